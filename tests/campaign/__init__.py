"""Trials by the hundred thousand, of which each must hold.

Each module but ``__main__``, which runs them, is a kind of trials, and has a function ::

    def trials(seed: int) -> Iterator[list[str]]: ...

It is one round, finite, and the same for the same seed. Each list is one trial: its violations, one line each, which
say what was done and what differed, so that it can be done again; none where all is well. A round takes a minute or
less where it can, for one that is stopped begins anew.
"""
