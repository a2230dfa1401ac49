"""Mutation tests: mistakes made on purpose, each of which must turn a named test red. Run on demand, not in CI.

    python -m tests.mutants                 # all of them, and the score
    python -m tests.mutants losses -j 2     # those whose file or description has this in it, two at a time

A rule that a user relies on has a mutant here that breaks it: a sign, a threshold, an order over ranks, a restored
state. To add one, append a :class:`Mutant` to a list of `tests/mutants/<part>.py`.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One mistake.

    Attributes:
        file: The file it is made in, from the root of the repository.
        old: The text that stands there, once in the whole file.
        new: What stands there instead.
        tests: The tests that must notice, as pytest is given them; several arguments are separated by spaces.
    """

    file: str
    old: str
    new: str
    tests: str
