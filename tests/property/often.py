"""How often a law is tried where nobody waits for it: more often than what is no law."""

import os

from hypothesis import settings

law = settings(max_examples=2000 if os.environ.get("CI") else 100, deadline=None)
