"""A report as a page: one HTML file that needs no server, no network and no other file.

    ../report.py, dump.py   what is shown (`CompileReport`, one for each graph)
      layers.py           a graph's text as lines that know their op and their layer
      diff.py, folding.py what a pass changed, and what of it is shown at once
      chart.py            equal layers as one chart
      attention.py, code.py, passes.py, graphs.py   the sections
      build.py            the page; page.css, page.js beside it

No part of a model is run, and no text from a model becomes markup: `html.py` escapes all of it.
"""

from attngraph.report.page.build import render as render
