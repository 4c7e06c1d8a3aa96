"""What tests of the benchmarks run under: one thread, and no network."""

import conformance.suite.offline  # noqa: F401 - before torch, which reads its settings as it is imported
