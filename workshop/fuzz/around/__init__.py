"""Programs whose answers depend on something around the values, which changes between two calls; eager is the
truth.

    places.py     where a number is kept, and the code through which forward comes to read it
    programs.py   a model that reads it, compiled in several ways, before and after a change
    asking.py     a function that asks something of its argument, or of what surrounds the call
"""
