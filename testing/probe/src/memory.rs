//! Amounts of memory, and how to take all there is.

use std::str::FromStr;

use crate::cuda::Context;

/// The smallest piece that is tried before giving up.
const LEAST: u64 = 1 << 20;

/// Memory of a GPU in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    pub(crate) total: u64,
    pub(crate) used: u64,
    pub(crate) free: u64,
}

/// A number of bytes, written like a Kubernetes quantity: `256Mi`, `1Gi`, `1000`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bytes(pub(crate) u64);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let unit: u64 = match &text[digits.len()..] {
            "" => 1,
            "Ki" => 1 << 10,
            "Mi" => 1 << 20,
            "Gi" => 1 << 30,
            "Ti" => 1 << 40,
            other => return Err(format!("`{other}` is not one of Ki, Mi, Gi, Ti")),
        };
        let number: u64 =
            digits.parse().map_err(|_| format!("`{digits}` is not a whole number"))?;
        number.checked_mul(unit).map(Self).ok_or_else(|| format!("`{text}` is too much"))
    }
}

/// Takes memory until 1 MiB is refused. Answers how much it was, and the name of the refusal.
pub(crate) fn fill(context: &Context<'_>, chunk: Bytes) -> (u64, String) {
    let mut taken = 0_u64;
    let mut chunk = chunk.0.max(LEAST);
    loop {
        match context.allocate(chunk) {
            Ok(()) => taken += chunk,
            Err(refusal) if chunk == LEAST => return (taken, refusal.name),
            Err(_) => chunk = (chunk / 2).max(LEAST),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_written_as_in_kubernetes() {
        assert_eq!("256Mi".parse(), Ok(Bytes(256 << 20)));
        assert_eq!("19Gi".parse(), Ok(Bytes(19 << 30)));
        assert_eq!("7".parse(), Ok(Bytes(7)));
        for wrong in ["", "Gi", "1G", "-1Gi", "1.5Gi", "99999999Ti"] {
            assert!(wrong.parse::<Bytes>().is_err(), "{wrong}");
        }
    }
}
