//! The command that speaks to a daemon.

use std::{
    io::{self, BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::Path,
};

use crate::protocol::END;

/// Why a command has no answer.
#[derive(Debug, thiserror::Error)]
pub enum FrontEndError {
    /// There is nobody. In the words of NVIDIA's program.
    #[error("Cannot find MPS control daemon process")]
    NoDaemon,
    /// The commands cannot be read, or answers not be written.
    #[error("cannot read commands and write answers")]
    Io(#[from] io::Error),
}

/// Sends each line of `commands` to the daemon at `socket`, and writes its answers.
///
/// # Errors
/// [`FrontEndError`].
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
        let asked =
            writeln!(connection, "{command}").and_then(|()| replies.read_until(END, &mut answer));
        if asked.is_err() || answer.pop() != Some(END) {
            return Err(FrontEndError::NoDaemon);
        }
        answers.write_all(&answer)?;
    }
    Ok(())
}
