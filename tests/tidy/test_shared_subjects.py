"""Tests that use one cluster have subjects of their own, whichever of them a worker runs."""

import ast
from collections import defaultdict

from tidy.tree import TEST_FILES


def subjects_created(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The subjects that a test creates by name on the cluster that all tests of a worker share."""
    parameters = function.args.args + function.args.kwonlyargs
    if not any(parameter.arg == "shared_cluster" for parameter in parameters):
        return set()
    return {
        call.args[0].value
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in {"create", "create_subject"}
        and call.args
        and isinstance(call.args[0], ast.Constant)
    }


def test_subject_of_the_shared_cluster_is_created_by_one_test():
    """A second test would find the messages of the first, or be refused for its other settings."""
    tests: dict[str, list[str]] = defaultdict(list)
    for source in TEST_FILES:
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for subject in subjects_created(node):
                    tests[subject].append(f"{source.name}::{node.name}")
    assert len(tests) > 50
    assert {subject: users for subject, users in tests.items() if len(users) > 1} == {}
