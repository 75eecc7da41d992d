//! What is said at the socket.

use std::{fmt, str::FromStr};

/// Ends each answer; no answer has it inside.
pub const END: u8 = 0;

/// What a client's greeting begins with, and a command never does.
const CLIENT: &str = "client ";

/// What a client says of itself, on one line.
#[derive(Clone, Debug, PartialEq)]
pub struct Greeting {
    /// What it takes itself for; the daemon goes by what the kernel says.
    pub pid: u32,
    /// As whom it takes itself to run.
    pub uid: u32,
    /// `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`: more than 0, at most 100.
    pub percentage: f64,
    /// `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`, or `none`: a word.
    pub memory: String,
    /// `CUDA_MPS_CLIENT_PRIORITY`: 0, or 1 for below normal.
    pub priority: u8,
}

impl fmt::Display for Greeting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, uid, percentage, memory, priority } = self;
        write!(
            f,
            "{CLIENT}pid={pid} uid={uid} percentage={percentage} memory={memory} priority={priority}"
        )
    }
}

/// A line that is no greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a client says `client pid=<pid> uid=<uid> percentage=<n> memory=<limit> priority=<0|1>`")]
pub struct NoGreeting;

impl FromStr for Greeting {
    type Err = NoGreeting;

    fn from_str(line: &str) -> Result<Self, NoGreeting> {
        let mut words = line.strip_prefix(CLIENT).ok_or(NoGreeting)?.split_whitespace();
        let mut value = |name: &str| {
            words
                .next()
                .and_then(|word| word.strip_prefix(name)?.strip_prefix('='))
                .ok_or(NoGreeting)
        };
        let greeting = Self {
            pid: number(value("pid")?)?,
            uid: number(value("uid")?)?,
            percentage: number(value("percentage")?)?,
            memory: value("memory")?.to_owned(),
            priority: number(value("priority")?)?,
        };
        let sound =
            greeting.percentage > 0.0 && greeting.percentage <= 100.0 && greeting.priority <= 1;
        (sound && words.next().is_none()).then_some(greeting).ok_or(NoGreeting)
    }
}

fn number<T: FromStr>(text: &str) -> Result<T, NoGreeting> {
    text.parse().map_err(|_| NoGreeting)
}

/// A line that somebody has sent.
#[derive(Clone, Debug, PartialEq)]
pub enum Line {
    /// A process wants to be a client.
    Client(Greeting),
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
    /// Anything else.
    Unknown(String),
}

impl From<&str> for Line {
    fn from(line: &str) -> Self {
        let unknown = || Self::Unknown(line.to_owned());
        if line.starts_with(CLIENT) {
            return line.parse().map_or_else(|NoGreeting| unknown(), Self::Client);
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

    const GREETING: &str = "client pid=7 uid=1000 percentage=12.5 memory=0=4G priority=1";

    #[test]
    fn a_greeting_reads_as_it_is_written() {
        let greeting: Greeting = GREETING.parse().expect("a greeting");
        assert_eq!((greeting.pid, greeting.memory.as_str()), (7, "0=4G"));
        assert_eq!(greeting.to_string(), GREETING);
    }

    #[test]
    fn what_is_no_greeting_is_unknown() {
        for wrong in
            ["client", "client pid=7", "client pid=7 uid=0 percentage=0 memory=none priority=0"]
        {
            assert_eq!(Line::from(wrong), Line::Unknown(wrong.to_owned()));
        }
    }

    #[test]
    fn commands_are_told_apart_by_their_words() {
        assert_eq!(Line::from("quit"), Line::Quit);
        assert_eq!(Line::from("quit -t 5"), Line::Quit);
        assert_eq!(Line::from(" get_client_list 12 "), Line::Clients);
        assert_eq!(Line::from("quit now"), Line::Unknown("quit now".to_owned()));
    }
}
