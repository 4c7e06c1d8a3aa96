"""The same questions put to every system that captures or splits a model: `python -m conformance.scoreboard --help`.

Each file imports only from those before it::

    programs    the models, each with what is difficult about it
    chosen      which of them the published board is about
    questions   what is asked, as steps that a script can repeat
    asking      one model twice: a system captures one of them, the other stays whole
    records     the answers, line by line in a file, so that a run resumes
    runner      a process for each target
    table       answers as a table of counts, and what the taxonomy's rows come to
    again       the scripts of wrong cases, run again
    page        the table as a page
"""
