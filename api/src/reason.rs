//! Reasons.
