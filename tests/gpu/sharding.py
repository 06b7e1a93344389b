"""A pytest plugin for ``tests.gpu``: of all tests this process takes every n-th. Kernels are compiled by one core each, so several
processes side by side are what makes the tests short."""

from typing import Any


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--shard", default="0/1", help="i/n: the i-th of n parts")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    part, count = map(int, config.getoption("--shard").split("/"))
    items[:] = [item for i, item in enumerate(items) if i % count == part]
