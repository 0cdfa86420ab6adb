"""python -m banyan ..."""

from .srt.cli import main

raise SystemExit(main())
