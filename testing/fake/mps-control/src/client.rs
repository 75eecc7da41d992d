//! A process that is a client of a daemon.

use std::{
    io::{self, BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::Path,
};

use crate::{
    environment,
    protocol::{ClientRequest, END},
};

/// A client's connection; the process is a client until it is dropped.
#[derive(Debug)]
pub struct Client {
    device: String,
    _connection: UnixStream,
}

/// Error of a connection to a daemon.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No daemon answers.
    #[error("no MPS daemon answers")]
    NoDaemon(#[from] io::Error),
    /// The daemon refuses the client.
    #[error("the MPS daemon refused the client: {0}")]
    Refused(String),
}

impl Client {
    /// Makes this process a client of the daemon with this pipe directory.
    ///
    /// # Errors
    /// Returns [`ClientError`] if no daemon answers or it refuses the client.
    pub fn connect(pipe: &Path, request: &ClientRequest) -> Result<Self, ClientError> {
        let mut connection = UnixStream::connect(environment::socket_in(pipe))?;
        writeln!(connection, "{request}")?;
        let mut answer = Vec::new();
        BufReader::new(&connection).read_until(END, &mut answer)?;
        let answer = String::from_utf8_lossy(&answer);
        let answer = answer.trim_end_matches([char::from(END), '\n']);
        match answer.strip_prefix("ok device=") {
            Some(device) => Ok(Self { device: device.to_owned(), _connection: connection }),
            None => Err(ClientError::Refused(answer.to_owned())),
        }
    }

    /// Returns the UUID of the daemon's GPU.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.device
    }
}
