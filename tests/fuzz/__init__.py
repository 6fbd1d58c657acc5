"""Fuzzing: each parser that receives foreign bytes, with one stated invariant.

    make fuzz                                 every target for ten minutes, two at a time
    make fuzz MINUTES=1 TARGET=frames SEED=7  one of them
    python -m tests.fuzz replay TARGET FILE   one input

A *target* (`target.py`; the modules `of_*` have them all) has a name, an invariant, seeds made by the real encoders,
and `check(data)`, which raises if the invariant does not hold for these bytes. `make test` runs every target over its
seeds and over the fixed corpus, `corpus/TARGET/`, which has every input that ever found something.

Engine: atheris, which is libFuzzer for Python, in a process for each target (`engine.py`). Coverage of the Python code
of natslog guides it, it catches crashes of native code (Arrow, the kernels) together with their input, and it limits
time and memory. It is installed from wheels for Linux on x86-64; elsewhere `make fuzz` is not available, and everything
else works without it. Kernels are compiled and not instrumented: the reference that a kernel is compared with is plain
Python, and guides the search instead.

Files have CRCs, so that arbitrary bytes never pass the first check. Where the property is "no changed byte is
accepted", the input is therefore a short script of edits of valid files (`edits.py`): a mutation of a script is a
structured mutation of the file.
"""
