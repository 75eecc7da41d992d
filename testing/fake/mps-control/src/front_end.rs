//! Command that sends requests to a daemon.

use std::{
    io::{self, BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::Path,
};

use crate::protocol::END;

/// Error of a request.
#[derive(Debug, thiserror::Error)]
pub enum FrontEndError {
    /// No daemon answers. The text is that of NVIDIA's program.
    #[error("Cannot find MPS control daemon process")]
    NoDaemon,
    /// Requests cannot be read, or answers cannot be written.
    #[error("cannot read commands and write answers")]
    Io(#[from] io::Error),
}

/// Sends each line of `commands` to the daemon at `socket`, and writes its answers.
///
/// # Errors
/// Returns [`FrontEndError`] if no daemon answers or on an I/O error.
pub fn send(
    socket: &Path,
    commands: impl BufRead,
    answers: &mut impl Write,
) -> Result<(), FrontEndError> {
    let mut connection = UnixStream::connect(socket).map_err(|_| FrontEndError::NoDaemon)?;
    let mut replies = BufReader::new(connection.try_clone()?);
    for command in commands.lines() {
        let command = command?;
        let mut answer = Vec::new();
        let result =
            writeln!(connection, "{command}").and_then(|()| replies.read_until(END, &mut answer));
        if result.is_err() || answer.pop() != Some(END) {
            return Err(FrontEndError::NoDaemon);
        }
        answers.write_all(&answer)?;
    }
    Ok(())
}
