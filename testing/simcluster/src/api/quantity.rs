//! Exact quantities in billionths, as the server and the scheduler compare them.
//!
//! Independent of `tessera-api` on purpose: the validation of the product's objects must not share
//! its parser.

/// A quantity in units of 10^-9.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Nano(pub i128);

const NANO: i128 = 1_000_000_000;

/// Parses a Kubernetes quantity. Amounts below 10^-9 are rounded up, as upstream does. Returns
/// `None` for invalid text.
pub fn parse(text: &str) -> Option<Nano> {
    let (sign, rest) = match text.as_bytes().first()? {
        b'-' => (-1, &text[1..]),
        b'+' => (1, &text[1..]),
        _ => (1, text),
    };
    let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
    let (number, suffix) = rest.split_at(digits);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return None;
    }
    let mantissa: i128 = format!("{whole}{fraction}").parse().ok()?;
    let scale = u32::try_from(fraction.len()).ok()?;
    let (numerator, denominator) = multiplier(suffix)?;
    let value = mantissa.checked_mul(NANO)?.checked_mul(numerator)?;
    let divisor = denominator.checked_mul(10_i128.checked_pow(scale)?)?;
    let rounded = value / divisor + i128::from(value % divisor != 0);
    Some(Nano(sign * rounded))
}

fn multiplier(suffix: &str) -> Option<(i128, i128)> {
    let factor = match suffix {
        "" => (1, 1),
        "n" => (1, NANO),
        "u" => (1, 1_000_000),
        "m" => (1, 1000),
        "k" => (1000, 1),
        "M" => (1_000_000, 1),
        "G" => (NANO, 1),
        "T" => (NANO * 1000, 1),
        "P" => (NANO * 1_000_000, 1),
        "E" => (NANO * NANO, 1),
        "Ki" => (1 << 10, 1),
        "Mi" => (1 << 20, 1),
        "Gi" => (1 << 30, 1),
        "Ti" => (1 << 40, 1),
        "Pi" => (1 << 50, 1),
        "Ei" => (1 << 60, 1),
        _ => return exponent(suffix),
    };
    Some(factor)
}

fn exponent(suffix: &str) -> Option<(i128, i128)> {
    let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
    let power = 10_i128.checked_pow(exponent.unsigned_abs())?;
    Some(if exponent < 0 { (1, power) } else { (power, 1) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_every_suffix() {
        for (text, nano) in [
            ("1", NANO),
            ("1500m", 1_500_000_000),
            ("0.5", 500_000_000),
            ("1k", 1000 * NANO),
            ("1Ki", 1024 * NANO),
            ("1.5Gi", 1536 * (1 << 20) * NANO),
            ("2e3", 2000 * NANO),
            ("-3", -3 * NANO),
            ("1n", 1),
            ("5E", 5 * NANO * NANO * NANO),
        ] {
            assert_eq!(parse(text), Some(Nano(nano)), "{text}");
        }
    }

    #[test]
    fn refuses_invalid_quantities() {
        for text in ["", "x", "1x", "1.2.3", ".", "Gi", "1 Gi", "--1"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
