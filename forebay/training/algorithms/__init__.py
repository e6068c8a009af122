"""What is learnt from a batch: pure functions on tensors, one module per concern.

Shapes and invariants that all of them share:
- R trained positions packed of S sequences. `sequence` (R,) int64 is the index of a token's sequence and never falls;
  all tokens of a sequence are in the same call. `mask` (R,) bool is True at the tokens that are trained.
- Per-token functions return (R,) and never average: `aggregation` says what weighs how much and what to divide by.
- Masked positions never touch a sum or a gradient, whatever they hold (infinities and NaN included). A trained position
  that is not finite is not hidden: it makes the loss not finite, and the step is refused.
- Log-ratios are clamped to +-20 before exp.
- Rewards and what is made of them are numpy float64 (`advantages`, `overlong`: no torch).
"""
