//! Short identifiers of fixed room.

use core::fmt;

/// Printable ASCII of at most `N` bytes, padded with NUL.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Text<const N: usize>([u8; N]);

/// Error of a string that is no [`Text`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextError {
    /// It has more bytes than there is room for.
    TooLong {
        /// Bytes given.
        len: usize,
        /// Bytes that fit.
        room: usize,
    },
    /// A byte outside printable ASCII.
    NotPrintable,
}

impl fmt::Display for TextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong { len, room } => write!(f, "{len} bytes where {room} fit"),
            Self::NotPrintable => f.write_str("a byte that is not printable ASCII"),
        }
    }
}

impl core::error::Error for TextError {}

impl<const N: usize> Text<N> {
    /// Takes a string.
    ///
    /// # Errors
    /// When it is longer than `N` bytes or not printable ASCII.
    pub const fn new(value: &str) -> Result<Self, TextError> {
        let from = value.as_bytes();
        if from.len() > N {
            return Err(TextError::TooLong { len: from.len(), room: N });
        }
        let mut bytes = [0; N];
        let mut at = 0;
        while at < from.len() {
            if !from[at].is_ascii_graphic() {
                return Err(TextError::NotPrintable);
            }
            bytes[at] = from[at];
            at += 1;
        }
        Ok(Self(bytes))
    }

    /// Takes the bytes of a file: text, then only NUL.
    pub(crate) fn from_padded(bytes: [u8; N]) -> Result<Self, TextError> {
        let len = bytes.iter().position(|byte| *byte == 0).unwrap_or(N);
        let (text, padding) = bytes.split_at(len);
        if text.iter().all(u8::is_ascii_graphic) && padding.iter().all(|byte| *byte == 0) {
            Ok(Self(bytes))
        } else {
            Err(TextError::NotPrintable)
        }
    }

    /// The text without its padding.
    #[must_use]
    pub fn as_str(&self) -> &str {
        let len = self.0.iter().position(|byte| *byte == 0).unwrap_or(N);
        // Only ASCII gets in, so this never falls back.
        core::str::from_utf8(&self.0[..len]).unwrap_or("")
    }

    /// The bytes with their padding, as they are in the file.
    #[must_use]
    pub const fn padded(&self) -> &[u8; N] {
        &self.0
    }
}

impl<const N: usize> fmt::Display for Text<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl<const N: usize> fmt::Debug for Text<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}
