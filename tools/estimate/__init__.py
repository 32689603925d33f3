"""How good `ac_core.estimate` is.

    accuracy    predicted peaks of small models against what torch's CPU allocator gave out in real steps
    plans       plans for the recipes that ship, applied, against what their steps then took
    guide       the table of the guide (Llama-3.2-1B) beside what is predicted for it

They print the tables of docs/estimate.md.
"""
