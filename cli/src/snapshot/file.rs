//! The file of a snapshot: one JSON document, compressed if its name ends in `.gz`.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde::{Deserialize, Serialize};

use super::Snapshot;

/// The document's `kind`.
const KIND: &str = "TesseraSnapshot";

/// Version of the format. It is incremented when an older program would misread a newer file, and
/// not for fields that older programs may ignore.
pub const VERSION: u32 = 1;

/// First bytes of a compressed file (RFC 1952). Files are recognized by content, not by name.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// The document.
#[derive(Serialize, Deserialize)]
struct Document<S> {
    kind: String,
    version: u32,
    #[serde(flatten)]
    snapshot: S,
}

/// The fields that every version has.
#[derive(Deserialize)]
struct Header {
    #[serde(default)]
    kind: String,
    #[serde(default)]
    version: u32,
}

/// Error returned when a file cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file cannot be written.
    #[error("cannot write snapshot `{path}`")]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file cannot be read.
    #[error("cannot read snapshot `{path}` (create one with `kubectl tessera snapshot -o FILE`)")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is not a snapshot.
    #[error("`{path}` is not a snapshot (create one with `kubectl tessera snapshot -o FILE`)")]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The cause, if the file is not a JSON document.
        source: Option<serde_json::Error>,
    },
    /// The file was written by a newer program.
    #[error(
        "snapshot `{path}` has format {found}, this program reads formats up to {VERSION}: update \
         kubectl-tessera"
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// The version of the file.
        found: u32,
    },
    /// The header is valid, and the rest is not.
    #[error("snapshot `{path}` is damaged")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: serde_json::Error,
    },
}

impl Snapshot {
    /// Writes the snapshot as JSON.
    ///
    /// # Errors
    /// Writing to `to` fails.
    pub fn write_to(&self, to: impl Write) -> io::Result<()> {
        let document = Document { kind: KIND.to_owned(), version: VERSION, snapshot: self };
        let mut to = to;
        serde_json::to_writer(&mut to, &document)?;
        to.write_all(b"\n")?;
        to.flush()
    }

    /// Writes the file, compressed if its name ends in `.gz`.
    ///
    /// # Errors
    /// [`FileError::Write`].
    pub fn save(&self, path: &Path) -> Result<(), FileError> {
        let failed = |source| FileError::Write { path: path.to_owned(), source };
        let file = BufWriter::new(File::create(path).map_err(failed)?);
        if path.extension().is_some_and(|extension| extension == "gz") {
            let mut packed = GzEncoder::new(file, Compression::default());
            self.write_to(&mut packed).map_err(failed)?;
            packed.finish().and_then(|mut file| file.flush()).map_err(failed)
        } else {
            self.write_to(file).map_err(failed)
        }
    }

    /// Reads a file, compressed or not.
    ///
    /// # Errors
    /// Every [`FileError`] except [`FileError::Write`].
    pub fn load(path: &Path) -> Result<Self, FileError> {
        let bytes =
            read(path).map_err(|source| FileError::Read { path: path.to_owned(), source })?;
        let foreign = |source| FileError::Foreign { path: path.to_owned(), source };
        let header: Header =
            serde_json::from_slice(&bytes).map_err(|error| foreign(Some(error)))?;
        match header {
            Header { kind, .. } if kind != KIND => Err(foreign(None)),
            Header { version: 0, .. } => Err(foreign(None)),
            Header { version, .. } if version > VERSION => {
                Err(FileError::Newer { path: path.to_owned(), found: version })
            }
            Header { .. } => serde_json::from_slice::<Document<Self>>(&bytes)
                .map(|document| document.snapshot)
                .map_err(|source| FileError::Damaged { path: path.to_owned(), source }),
        }
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    BufReader::new(File::open(path)?).read_to_end(&mut bytes)?;
    if bytes.starts_with(&GZIP_MAGIC) {
        let mut unpacked = Vec::new();
        GzDecoder::new(bytes.as_slice()).read_to_end(&mut unpacked)?;
        return Ok(unpacked);
    }
    Ok(bytes)
}
