//! Numbers as HAMi-core reads them.

/// Value of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Number {
    /// Nothing, or 0.
    None,
    /// A number; what is above 2^64 - 1 is that.
    Of(u64),
    /// No number, or one below 0.
    Senseless,
}

/// As `strtoul` with base 0 reads it, times the unit of the last letter. What follows the number is
/// not looked at.
pub(crate) fn number(text: &[u8]) -> Number {
    let Some(last) = text.last() else { return Number::None };
    let unit: u64 = match last {
        b'k' | b'K' => 1 << 10,
        b'm' | b'M' => 1 << 20,
        b'g' | b'G' => 1 << 30,
        _ => 1,
    };
    let text = text
        .iter()
        .position(|byte| !is_space(*byte))
        .and_then(|at| text.get(at..))
        .unwrap_or_default();
    let (negative, text) = match text {
        [b'-', rest @ ..] => (true, rest),
        [b'+', rest @ ..] => (false, rest),
        _ => (false, text),
    };
    let (base, digits) = match text {
        [b'0', b'x' | b'X', rest @ ..] if rest.first().is_some_and(u8::is_ascii_hexdigit) => {
            (16, rest)
        }
        [b'0', ..] => (8, text),
        _ => (10, text),
    };
    let mut value = None;
    for byte in digits {
        let Some(digit) = char::from(*byte).to_digit(base) else { break };
        let above = value.unwrap_or(0_u64).saturating_mul(base.into());
        value = Some(above.saturating_add(digit.into()));
    }
    match value {
        Some(0) => Number::None,
        Some(value) if !negative => Number::Of(value.saturating_mul(unit)),
        _ => Number::Senseless,
    }
}

/// As `isspace` in the C locale.
fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t'..=b'\r')
}
