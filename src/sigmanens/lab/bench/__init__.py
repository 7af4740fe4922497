"""Studies: many trainings under one recipe and one measuring, each resumable.

``config`` says what a study is, ``trials`` which trainings it consists of, ``methods`` how each
method is built and trained, ``work`` does one of them, ``runner`` all of them, ``gather`` makes one
``metrics.json`` of what they left. Importing this package loads none of the large libraries.
"""
