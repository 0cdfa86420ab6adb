"""Every route of the server and who may use it. A path that is not in the table needs a key like any other, and is a 404 then."""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType


class Access(Enum):
    """Who may use a route. PUBLIC: everyone. API: who has the API key, if there is one. ADMIN: see srt/auth.py."""

    PUBLIC = "public"
    API = "api"
    ADMIN = "admin"


def _table() -> dict[str, Access]:
    public = ("/health", "/health_generate", "/livez", "/metrics", "/readyz", "/startupz")
    api = (
        "/",
        "/docs",
        "/docs/oauth2-redirect",
        "/openapi.json",
        "/redoc",
        "/apply-template",
        "/detokenize",
        "/generate",
        "/get_load",
        "/get_model_info",
        "/get_server_info",
        "/model_info",
        "/parse_function_call",
        "/separate_reasoning",
        "/server_info",
        "/tokenize",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/detokenize",
        "/v1/loads",
        "/v1/models",
        "/v1/models/{name:path}",
        "/v1/score",
        "/v1/tokenize",
        "/open_session",
        "/close_session",
    )
    admin = (
        "/abort_request",
        "/continue_generation",
        "/drain",
        "/dump",
        "/flush_cache",
        "/pause_generation",
        "/radix_cache",
        "/radix_cache/explain",
        "/destroy_weights_update_group",
        "/get_weights_by_name",
        "/init_weights_update_group",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/start_profile",
        "/stop_profile",
        "/update_weight_version",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
        "/update_weights_from_tensor",
    )
    return {
        **dict.fromkeys(public, Access.PUBLIC),
        **dict.fromkeys(api, Access.API),
        **dict.fromkeys(admin, Access.ADMIN),
    }


ROUTES = MappingProxyType(_table())


def access_of(path: str) -> Access:
    """The class of a request's decoded path, exactly as the router sees it. Whatever is not listed is no public route."""
    return ROUTES.get(path, Access.API)
