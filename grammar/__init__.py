"""Text to tree: sources and spans, diagnostics, errors, syntax classes, the parser.

source        texts, spans, lines and columns
diagnostics   findings as data
errors        the tree of exceptions
syntax        what was written, node by node
parser        text -> syntax.File with every syntax error of the text in one run
patterns      patterns over the dotted names of parameters and modules

The parser's parts, in the order of their work:

tables        pdsl.lark as LALR(1) tables, computed by lark and cached (cache)
lexer         text -> tokens and comments
delimiters    brackets matched and mended
recovery      the machine with values: goes on after an error (automaton: the machine alone)
builder       productions -> syntax nodes
situation     where the machine stands when it cannot go on; mistakes, wording: the diagnostic for it
"""
