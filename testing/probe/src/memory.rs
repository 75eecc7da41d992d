//! Amounts of memory, and allocation up to the limit.

use std::str::FromStr;

use crate::cuda::Context;

/// Smallest allocation that is tried.
const MIN_CHUNK: u64 = 1 << 20;

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
            other => return Err(format!("invalid unit `{other}`: expected Ki, Mi, Gi or Ti")),
        };
        let number: u64 = digits.parse().map_err(|_| format!("invalid number `{digits}`"))?;
        number.checked_mul(unit).map(Self).ok_or_else(|| format!("`{text}` is too large"))
    }
}

/// Allocates memory until 1 MiB is refused. Returns the allocated bytes and the name of the error.
pub(crate) fn fill(context: &Context<'_>, chunk: Bytes) -> (u64, String) {
    let mut taken = 0_u64;
    let mut chunk = chunk.0.max(MIN_CHUNK);
    loop {
        match context.allocate(chunk) {
            Ok(()) => taken += chunk,
            Err(error) if chunk == MIN_CHUNK => return (taken, error.name),
            Err(_) => chunk = (chunk / 2).max(MIN_CHUNK),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_kubernetes_quantities() {
        assert_eq!("256Mi".parse(), Ok(Bytes(256 << 20)));
        assert_eq!("19Gi".parse(), Ok(Bytes(19 << 30)));
        assert_eq!("7".parse(), Ok(Bytes(7)));
        for wrong in ["", "Gi", "1G", "-1Gi", "1.5Gi", "99999999Ti"] {
            assert!(wrong.parse::<Bytes>().is_err(), "{wrong}");
        }
    }
}
