//! Parsing of quantities. The grammar, as permissive as apimachinery's scanner:
//!
//! ```text
//! quantity = [sign] digits* ["." digits*] suffix      no digit is required: "Mi" is zero
//! suffix   = "" n u m k M G T P E | Ki Mi Gi Ti Pi Ei | ("e" | "E") [sign] digits+
//! ```

use super::format::Format;
use super::{NANO, Quantity};

/// Decimal places of a billionth.
const NANO_DIGITS: i64 = 9;

/// Error returned for a text that is not a quantity, or exceeds the range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// Not of the form number and suffix.
    #[error(
        "`{text}` is not a quantity; write a number and a suffix, such as `19Gi`, `500m` or `25`"
    )]
    Malformed {
        /// The refused text.
        text: String,
    },
    /// The number is there, its suffix is unknown.
    #[error(
        "the quantity `{text}` has the unknown suffix `{suffix}`; \
         known are n u m k M G T P E, Ki Mi Gi Ti Pi Ei and exponents such as e3"
    )]
    UnknownSuffix {
        /// The refused text.
        text: String,
        /// Its suffix.
        suffix: String,
    },
    /// More than is kept exactly.
    #[error("the quantity `{text}` is too large; amounts up to 1.7e29 are kept")]
    TooLarge {
        /// The refused text.
        text: String,
    },
}

/// Factor of a suffix.
#[derive(Clone, Copy)]
enum Scale {
    Ten { exponent: i32, format: Format },
    Two { exponent: u32 },
}

/// A scanned quantity: `integer.fraction` and the suffix, all still text.
struct Scanned<'a> {
    negative: bool,
    integer: &'a str,
    fraction: &'a str,
    suffix: &'a str,
}

pub(super) fn parse(text: &str) -> Result<Quantity, QuantityError> {
    let malformed = || QuantityError::Malformed { text: text.to_owned() };
    let scanned = scan(text).ok_or_else(malformed)?;
    let scale = scale_of(scanned.suffix).ok_or_else(|| QuantityError::UnknownSuffix {
        text: text.to_owned(),
        suffix: scanned.suffix.to_owned(),
    })?;
    // Upstream's slow path needs a digit, its fast path does not.
    if scanned.has_no_digits()
        && matches!(scale, Scale::Ten { exponent, .. } if i64::from(exponent) < -NANO_DIGITS)
    {
        return Err(malformed());
    }
    let (magnitude, format) = match scale {
        Scale::Ten { exponent, format } => (decimal_nano(&scanned, exponent), format),
        Scale::Two { exponent } => {
            // Capped as upstream does it, so that sums of a few stay within an int64.
            let capped = binary_nano(&scanned, exponent)
                .unwrap_or(i128::MAX)
                .min(i128::from(i64::MAX) * NANO);
            let format =
                if capped > 0 && capped < NANO { Format::DecimalSi } else { Format::BinarySi };
            (Some(capped), format)
        }
    };
    let magnitude = magnitude.ok_or_else(|| QuantityError::TooLarge { text: text.to_owned() })?;
    Ok(Quantity { nano: if scanned.negative { -magnitude } else { magnitude }, format })
}

fn scan(text: &str) -> Option<Scanned<'_>> {
    if text.is_empty() {
        return None;
    }
    let (negative, unsigned) = match text.as_bytes()[0] {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let (integer, rest) = split_digits(unsigned);
    let (fraction, suffix) = rest.strip_prefix('.').map_or(("", rest), split_digits);
    let letters = suffix.trim_start_matches(|c| "eEinumkKMGTP".contains(c));
    let digits = letters.strip_prefix(['-', '+']).unwrap_or(letters);
    digits.bytes().all(|b| b.is_ascii_digit()).then_some(Scanned {
        negative,
        integer,
        fraction,
        suffix,
    })
}

fn split_digits(text: &str) -> (&str, &str) {
    text.split_at(text.bytes().take_while(u8::is_ascii_digit).count())
}

fn scale_of(suffix: &str) -> Option<Scale> {
    let si = |exponent| Some(Scale::Ten { exponent, format: Format::DecimalSi });
    match suffix {
        "n" => si(-9),
        "u" => si(-6),
        "m" => si(-3),
        "" => si(0),
        "k" => si(3),
        "M" => si(6),
        "G" => si(9),
        "T" => si(12),
        "P" => si(15),
        "E" => si(18),
        "Ki" => Some(Scale::Two { exponent: 10 }),
        "Mi" => Some(Scale::Two { exponent: 20 }),
        "Gi" => Some(Scale::Two { exponent: 30 }),
        "Ti" => Some(Scale::Two { exponent: 40 }),
        "Pi" => Some(Scale::Two { exponent: 50 }),
        "Ei" => Some(Scale::Two { exponent: 60 }),
        _ => {
            let exponent = suffix.strip_prefix(['e', 'E'])?.parse::<i32>().ok()?;
            Some(Scale::Ten { exponent, format: Format::DecimalExponent })
        }
    }
}

/// The magnitude of a decimal quantity in billionths, rounded up; `None` if too large.
fn decimal_nano(scanned: &Scanned<'_>, exponent: i32) -> Option<i128> {
    shifted(&scanned.digits(), i64::from(exponent) + NANO_DIGITS - scanned.fraction.len() as i64)
}

/// The magnitude of a binary quantity in billionths, rounded up; `None` if too large.
fn binary_nano(scanned: &Scanned<'_>, exponent: u32) -> Option<i128> {
    let mut digits = scanned.digits();
    for _ in 0..exponent / 10 {
        multiply_by_1024(&mut digits);
    }
    shifted(&digits, NANO_DIGITS - scanned.fraction.len() as i64)
}

impl Scanned<'_> {
    /// The digits of the number without its decimal point, most significant first, as numbers.
    fn digits(&self) -> Vec<u8> {
        self.integer.bytes().chain(self.fraction.bytes()).map(|b| b - b'0').collect()
    }

    fn has_no_digits(&self) -> bool {
        self.integer.is_empty() && self.fraction.is_empty()
    }
}

/// Multiplies a number given by its decimal digits. Digits rather than machine words, since a
/// number may have any length and still denote a small amount.
fn multiply_by_1024(digits: &mut Vec<u8>) {
    let mut carry = 0_u32;
    for digit in digits.iter_mut().rev() {
        let product = u32::from(*digit) * 1024 + carry;
        *digit = (product % 10) as u8;
        carry = product / 10;
    }
    let mut front = Vec::new();
    while carry > 0 {
        front.insert(0, (carry % 10) as u8);
        carry /= 10;
    }
    digits.splice(0..0, front);
}

/// The number times ten to the power of `shift`, rounded up to a whole number; `None` if that is
/// too large.
fn shifted(digits: &[u8], shift: i64) -> Option<i128> {
    let significant = &digits[digits.iter().take_while(|digit| **digit == 0).count()..];
    if significant.is_empty() {
        return Some(0);
    }
    if shift >= 0 {
        let power = 10_i128.checked_pow(u32::try_from(shift).ok()?)?;
        return whole(significant)?.checked_mul(power);
    }
    let dropped =
        usize::try_from(shift.unsigned_abs()).unwrap_or(usize::MAX).min(significant.len());
    let (kept, lost) = significant.split_at(significant.len() - dropped);
    let rounds_up = lost.iter().any(|digit| *digit != 0);
    whole(kept)?.checked_add(i128::from(rounds_up))
}

fn whole(digits: &[u8]) -> Option<i128> {
    digits
        .iter()
        .try_fold(0_i128, |value, digit| value.checked_mul(10)?.checked_add(i128::from(*digit)))
}
