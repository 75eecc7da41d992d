//! Printing of quantities: the canonical form of apimachinery's `CanonicalizeBytes`.

use std::fmt;

use super::{NANO, Quantity};

/// The notation a quantity was written in and is printed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// `n u m` nothing `k M G T P E`: powers of 1000.
    DecimalSi,
    /// `Ki Mi Gi Ti Pi Ei`: powers of 1024.
    BinarySi,
    /// `e3`: a decimal exponent.
    DecimalExponent,
}

const BINARY_SUFFIXES: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
/// From 10⁻⁹ to 10¹⁸ in steps of 1000.
const DECIMAL_SUFFIXES: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];

impl fmt::Display for Quantity {
    /// The canonical form: no fraction, the largest suffix that allows that. Binary notation
    /// becomes decimal below 1024 and where there is a fraction, so that nothing is lost.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.canonical())
    }
}

impl Quantity {
    fn canonical(&self) -> String {
        if self.is_zero() {
            return "0".to_owned();
        }
        let binary = self.is_integer() && self.nano.unsigned_abs() >= 1024 * NANO.unsigned_abs();
        match self.format {
            Format::BinarySi if binary => binary_si(self.nano / NANO),
            Format::BinarySi | Format::DecimalSi => decimal_si(self.nano),
            Format::DecimalExponent => decimal_exponent(self.nano),
        }
    }
}

fn binary_si(value: i128) -> String {
    let (mantissa, power) = strip_factors(value, 1024, BINARY_SUFFIXES.len() - 1);
    format!("{mantissa}{}", BINARY_SUFFIXES[power])
}

fn decimal_si(nano: i128) -> String {
    let (mantissa, power) = strip_factors(nano, 1000, DECIMAL_SUFFIXES.len() - 1);
    format!("{mantissa}{}", DECIMAL_SUFFIXES[power])
}

fn decimal_exponent(nano: i128) -> String {
    // An i128 has no more than 12 factors of 1000.
    let (mantissa, power) = strip_factors(nano, 1000, 12);
    match power as i32 * 3 - 9 {
        0 => mantissa.to_string(),
        exponent => format!("{mantissa}e{exponent}"),
    }
}

/// Takes out `factor` while it divides, at most `limit` times; says how often.
fn strip_factors(mut value: i128, factor: i128, limit: usize) -> (i128, usize) {
    let mut times = 0;
    while times < limit && value % factor == 0 {
        value /= factor;
        times += 1;
    }
    (value, times)
}
