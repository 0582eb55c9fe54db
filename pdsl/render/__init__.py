"""Rendering: what PDSL has to show, as text. Nothing is decided here.

diagnostics   findings for people: with their lines, or one line each
reports       findings for machines: json, github, sarif, junit
plan          a plan on one screen
schedule      a schedule drawn with characters
search        how a schedule was found
svg           a schedule drawn as SVG
goodput       a simulation under failures: text, JSON, SVG
origins       every value of a spec and where it came from
terminal      what a stream can show; tables, bars, numbers with units
"""
