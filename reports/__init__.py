"""Reports: raw results in, one self-contained HTML page out, and the same facts in Markdown beside it.

Each module imports only from those before it:

    document    what a report consists of: sections of prose, tables, figures and the matrix
    words       numbers, intervals and places as a report writes them
    runs        folders of raw results, read and checked
    outcomes    what a status counts as
    charts      data -> static SVG
    equality, whole_zoo, speed, startup, payback, boundary, earlier, methods      one section each
    verdicts    the strip at the top
    frames      findings -> tables of numbers, for Parquet
    raw         the files that a report keeps, and how they are downloaded
    markdown, page                                                          document -> text
    build       folders in, a folder out
"""
