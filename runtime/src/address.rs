//! The value of `--metrics-address`.

use std::{
    net::{AddrParseError, SocketAddr},
    str::FromStr,
};

/// An address to listen at. The empty text means none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenAddress(pub Option<SocketAddr>);

impl FromStr for ListenAddress {
    type Err = AddrParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.is_empty() {
            Ok(Self(None))
        } else {
            text.parse().map(|address| Self(Some(address)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_address_or_empty_text_only() {
        assert_eq!("".parse(), Ok(ListenAddress(None)));
        assert_eq!(
            "[::1]:9400".parse(),
            Ok(ListenAddress(Some(SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], 9400)))))
        );
        assert!("9400".parse::<ListenAddress>().is_err());
    }
}
