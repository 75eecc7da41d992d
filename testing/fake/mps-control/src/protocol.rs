//! Protocol of the daemon's socket.

use std::{fmt, str::FromStr};

/// Byte that ends each answer and is in no answer.
pub const END: u8 = 0;

/// Prefix of a client's request, with which no command begins.
const CLIENT: &str = "client ";

/// Registration of a client, on one line.
#[derive(Clone, Debug, PartialEq)]
pub struct ClientRequest {
    /// PID as the client sees it; the daemon uses the kernel's.
    pub pid: u32,
    /// User ID as the client sees it.
    pub uid: u32,
    /// Value of `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`: more than 0, at most 100.
    pub percentage: f64,
    /// Value of `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`, or `none`; has no spaces.
    pub memory: String,
    /// Value of `CUDA_MPS_CLIENT_PRIORITY`: 0, or 1 for below normal.
    pub priority: u8,
}

impl fmt::Display for ClientRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, uid, percentage, memory, priority } = self;
        write!(
            f,
            "{CLIENT}pid={pid} uid={uid} percentage={percentage} memory={memory} priority={priority}"
        )
    }
}

/// Error of an invalid client request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected `client pid=<pid> uid=<uid> percentage=<n> memory=<limit> priority=<0|1>`")]
pub struct InvalidClientRequest;

impl FromStr for ClientRequest {
    type Err = InvalidClientRequest;

    fn from_str(line: &str) -> Result<Self, InvalidClientRequest> {
        let mut words = line.strip_prefix(CLIENT).ok_or(InvalidClientRequest)?.split_whitespace();
        let mut value = |name: &str| {
            words
                .next()
                .and_then(|word| word.strip_prefix(name)?.strip_prefix('='))
                .ok_or(InvalidClientRequest)
        };
        let request = Self {
            pid: number(value("pid")?)?,
            uid: number(value("uid")?)?,
            percentage: number(value("percentage")?)?,
            memory: value("memory")?.to_owned(),
            priority: number(value("priority")?)?,
        };
        let is_valid =
            request.percentage > 0.0 && request.percentage <= 100.0 && request.priority <= 1;
        (is_valid && words.next().is_none()).then_some(request).ok_or(InvalidClientRequest)
    }
}

fn number<T: FromStr>(text: &str) -> Result<T, InvalidClientRequest> {
    text.parse().map_err(|_| InvalidClientRequest)
}

/// A request line.
#[derive(Clone, Debug, PartialEq)]
pub enum Line {
    /// Registers a client.
    Client(ClientRequest),
    /// `get_default_active_thread_percentage`.
    DefaultPercentage,
    /// `get_server_list`.
    Servers,
    /// `get_client_list [PID of a server]`.
    Clients,
    /// `get_device_client_list`.
    DeviceClients,
    /// `quit [-t SECONDS]`.
    Quit,
    /// Any other line.
    Unknown(String),
}

impl From<&str> for Line {
    fn from(line: &str) -> Self {
        let unknown = || Self::Unknown(line.to_owned());
        if line.starts_with(CLIENT) {
            return line.parse().map_or_else(|InvalidClientRequest| unknown(), Self::Client);
        }
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["get_default_active_thread_percentage"] => Self::DefaultPercentage,
            ["get_server_list"] => Self::Servers,
            ["get_client_list"] | ["get_client_list", _] => Self::Clients,
            ["get_device_client_list"] => Self::DeviceClients,
            ["quit"] | ["quit", "-t", _] => Self::Quit,
            _ => unknown(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: &str = "client pid=7 uid=1000 percentage=12.5 memory=0=4G priority=1";

    #[test]
    fn client_request_round_trips() {
        let request: ClientRequest = REQUEST.parse().expect("a valid request");
        assert_eq!((request.pid, request.memory.as_str()), (7, "0=4G"));
        assert_eq!(request.to_string(), REQUEST);
    }

    #[test]
    fn invalid_client_request_is_unknown() {
        for wrong in
            ["client", "client pid=7", "client pid=7 uid=0 percentage=0 memory=none priority=0"]
        {
            assert_eq!(Line::from(wrong), Line::Unknown(wrong.to_owned()));
        }
    }

    #[test]
    fn parses_commands() {
        assert_eq!(Line::from("quit"), Line::Quit);
        assert_eq!(Line::from("quit -t 5"), Line::Quit);
        assert_eq!(Line::from(" get_client_list 12 "), Line::Clients);
        assert_eq!(Line::from("quit now"), Line::Unknown("quit now".to_owned()));
    }
}
