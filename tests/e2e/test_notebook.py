"""EN-04: an Engine in the cells of a notebook. As in IPython, each cell is compiled with await allowed at its top and run on one
event loop that runs already; no nest_asyncio, no __main__ guard."""

from __future__ import annotations

import ast
import asyncio
import inspect
from typing import Any

CELLS = [
    "from banyan import Engine\nengine = Engine(model_path=MODEL, load_format='oracle', max_total_tokens=2048, strict=True)",
    "params = {'max_new_tokens': 6, 'temperature': 0, 'ignore_eos': True}\nfirst = engine.generate('hello', params)",
    "second = await engine.async_generate('hello', params)",
    "chunks = list(engine.generate('hello', params, stream=True))",
    "streamed = [chunk async for chunk in await engine.async_generate('hello', params, stream=True)]",
    "import asyncio\nmany = await asyncio.gather(*[engine.async_generate('hello', params) for _ in range(8)], asyncio.sleep(0))",
    "import threading\nfound = []\nthread = threading.Thread(target=lambda: found.append(engine.generate('hello', params)))",
    "thread.start()\nthread.join()",
    "session = engine.open_session(1000)\nengine.close_session(session)\nengine.flush_cache()",
    "engine.shutdown()",
]


async def run_cells(names: dict[str, Any]) -> None:
    for cell in CELLS:
        code = compile(cell, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, names)
        if inspect.iscoroutine(result):
            await result


def test_cells(model: str) -> None:
    names: dict[str, Any] = {"MODEL": model}
    asyncio.run(run_cells(names))
    ids = names["first"]["output_ids"]
    assert len(ids) == 6
    answers = [names["second"], names["chunks"][-1], names["streamed"][-1], *names["many"][:8], *names["found"]]
    assert [answer["output_ids"] for answer in answers] == [ids] * 12
