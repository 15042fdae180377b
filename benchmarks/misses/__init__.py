"""How well misses are explained: labelled cases in two halves, split by form, and what a comparison costs."""
