"""Text to tree: sources and spans, diagnostics, errors, syntax classes, the parser.

source        texts, spans, lines and columns
diagnostics   findings as data
errors        the tree of exceptions
syntax        what was written, node by node
parser        text -> syntax.File with every syntax error of the text in one run
"""
