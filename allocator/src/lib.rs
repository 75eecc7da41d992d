//! What is decided: which device serves which claim. Pure.
