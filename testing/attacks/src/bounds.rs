//! Time limits of the tests: generous on a busy machine, those of the findings when asked for.

use std::time::Duration;

/// Environment variable that selects the limits of the findings. `make bench-attacks` sets it.
pub const STRICT_VARIABLE: &str = "TESSERA_ATTACKS_STRICT";

/// Ratio of the limits of `make test-attacks`, with debug builds on a busy machine, to the strict
/// ones.
const BUSY_FACTOR: u32 = 150;

/// Factor of the limits of ratios in the same case: both times are of a busy machine.
const BUSY_RATIO: f64 = 20.0;

/// Returns true if the limits of the findings apply: optimised builds on an idle machine.
pub fn is_strict() -> bool {
    std::env::var_os(STRICT_VARIABLE).is_some()
}

/// Returns the time limit of a test for an operation that a finding limits to `strict`.
pub fn limit(strict: Duration) -> Duration {
    if is_strict() { strict } else { strict * BUSY_FACTOR }
}

/// Returns the limit of a ratio of two times of one run limited to `strict`.
pub fn ratio(strict: f64) -> f64 {
    if is_strict() { strict } else { strict * BUSY_RATIO }
}

/// Returns the size of an attack: that of the finding, or a smaller one that still exceeds every
/// bound, for debug builds.
pub fn size(strict: usize, small: usize) -> usize {
    if is_strict() { strict } else { small }
}
