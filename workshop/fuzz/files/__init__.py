"""Files of somebody else: edited and newly signed ones must be refused, or harmless.

    edits.py      random edits of texts, JSON values and bytes
    subjects.py   what is edited and tried: folders of a module and of a decoder, dumps, caches, artifacts
    run.py        each edit in a process of its own, with limits of time and memory, and a look at what it did

`python -m workshop.fuzz.files --edits 10000` runs it; with `--sanitize` kernels are compiled with
AddressSanitizer.
"""
