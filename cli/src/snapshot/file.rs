//! The file that a snapshot is saved in: one JSON document, compressed where its name ends in
//! `.gz`.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde::{Deserialize, Serialize};

use super::Snapshot;

/// What the document says it is.
const KIND: &str = "TesseraSnapshot";

/// Version of the format. It grows when an older program would misread a newer file; fields that
/// older programs may do without are added without it.
pub const VERSION: u32 = 1;

/// Beginning of a compressed file (RFC 1952), whatever its name.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// The document.
#[derive(Serialize, Deserialize)]
struct Document<S> {
    kind: String,
    version: u32,
    #[serde(flatten)]
    snapshot: S,
}

/// What every version has.
#[derive(Deserialize)]
struct Header {
    #[serde(default)]
    kind: String,
    #[serde(default)]
    version: u32,
}

/// Why a file was not written or not read.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be written.
    #[error("cannot write snapshot `{path}`")]
    Write {
        /// The file.
        path: PathBuf,
        /// What the file system says.
        source: io::Error,
    },
    /// It cannot be read.
    #[error("cannot read snapshot `{path}`; `kubectl tessera snapshot -o FILE` makes one")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the file system says.
        source: io::Error,
    },
    /// It is something else.
    #[error(
        "`{path}` is no snapshot of this program; `kubectl tessera snapshot -o FILE` makes one"
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What does not look like one.
        source: Option<serde_json::Error>,
    },
    /// It was written by a newer program.
    #[error(
        "snapshot `{path}` has format {found}, and this program reads up to {VERSION}: update kubectl-tessera"
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// Its head is right and the rest is not.
    #[error("snapshot `{path}` is damaged")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where.
        source: serde_json::Error,
    },
}

impl Snapshot {
    /// Writes the snapshot as JSON.
    ///
    /// # Errors
    /// `to` does not take it.
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
    /// Every [`FileError`] but that of writing.
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
