"""Does a plugin keep the rules of its hooks? A suite of checks for strategies, schedules, planners, checkpoint backends, op rules.

    pip install "meshwright-dtensor[testing]"
    pytest --pyargs meshwright_dtensor.testing.conformance --plugin NAME

NAME is a distribution, an entry point or the name of one record. Every check that fails says in one sentence what is wrong, which
rule that breaks and what to do. What needs a package that is not installed is skipped, with its name.
"""
