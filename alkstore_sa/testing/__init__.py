"""What an application's own tests use: one transaction for the store and the test, jobs run on the calling thread, time moved on.

`alkstore_sa.testing.aio` has the same for tests on a running event loop. The fixtures stand in `alkstore_sa.testing.fixtures` and are
loaded only by `pytest_plugins = ["alkstore_sa.testing.fixtures"]`.
"""

from alkstore_sa.testing.asserting import assert_enqueued
from alkstore_sa.testing.clock import advance
from alkstore_sa.testing.joining import joined
from alkstore_sa.testing.running import RanJob, run_due

__all__ = ["RanJob", "advance", "assert_enqueued", "joined", "run_due"]
