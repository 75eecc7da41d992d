//! A process that is a client of a daemon.

use std::{
    io::{self, BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::Path,
};

use crate::{
    environment,
    protocol::{END, Greeting},
};

/// A connection, as long as which the process is a client.
#[derive(Debug)]
pub struct Client {
    device: String,
    _connection: UnixStream,
}

/// Why the process is no client.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody answers.
    #[error("no MPS daemon answers")]
    NoDaemon(#[from] io::Error),
    /// The daemon does not want it.
    #[error("the MPS daemon refuses: {0}")]
    Refused(String),
}

impl Client {
    /// Makes this process a client of the daemon whose pipe directory that is.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn connect(pipe: &Path, greeting: &Greeting) -> Result<Self, ClientError> {
        let mut connection = UnixStream::connect(environment::socket_in(pipe))?;
        writeln!(connection, "{greeting}")?;
        let mut answer = Vec::new();
        BufReader::new(&connection).read_until(END, &mut answer)?;
        let answer = String::from_utf8_lossy(&answer);
        let answer = answer.trim_end_matches([char::from(END), '\n']);
        match answer.strip_prefix("ok device=") {
            Some(device) => Ok(Self { device: device.to_owned(), _connection: connection }),
            None => Err(ClientError::Refused(answer.to_owned())),
        }
    }

    /// UUID of the daemon's GPU.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.device
    }
}
