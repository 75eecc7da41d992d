//! Files that are replaced in one step.

use std::{
    fs::Permissions,
    io::{self, Write},
    os::unix::fs::PermissionsExt,
    path::Path,
};

/// Writes `content` to a temporary file in the directory of `path` and renames it to `path`.
///
/// Readers see the old content or the new one, never a part of it, and a process that has the old
/// file open or mapped keeps it. The new file has exactly the permissions `mode`, whatever the
/// umask is. Several writers may write the same file at the same time; the last rename wins. The
/// name of the temporary file is `.<file name>.<random>.tmp`. It is removed on an error, and left
/// behind only if the process is killed in between.
///
/// Nothing is synced to a disk. After a power failure the file may be empty or missing: callers
/// write to a tmpfs, or write the file again at their next start.
///
/// # Errors
/// The error of the operating system. `path` is unchanged then.
pub fn write(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path has no file name"));
    };
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    let prefix = format!(".{}.", name.to_string_lossy());
    let mut file =
        tempfile::Builder::new().prefix(&prefix).suffix(".tmp").tempfile_in(directory)?;
    file.write_all(content)?;
    file.as_file().set_permissions(Permissions::from_mode(mode))?;
    file.persist(path).map(drop).map_err(|error| error.error)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt};

    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).expect("a directory");
        let name = |entry: io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
        let mut names: Vec<_> =
            entries.map(|entry| name(entry).into_string().expect("UTF-8")).collect();
        names.sort();
        names
    }

    #[test]
    fn replaces_file_and_leaves_no_temporary_file() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("journal.json");
        write(&path, b"one", 0o600).expect("written");
        let before = fs::metadata(&path).expect("the file");
        write(&path, b"two", 0o644).expect("written");
        let after = fs::metadata(&path).expect("the file");
        assert_eq!(fs::read(&path).expect("the file"), b"two");
        assert_eq!((before.mode() & 0o7777, after.mode() & 0o7777), (0o600, 0o644));
        assert_ne!(before.ino(), after.ino(), "readers of the old file keep it");
        assert_eq!(names(directory.path()), ["journal.json"]);
    }

    #[test]
    fn failed_write_changes_nothing() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("taken");
        fs::create_dir(&path).expect("a directory");
        write(&path, b"content", 0o644).expect_err("a directory has the name");
        assert_eq!(names(directory.path()), ["taken"]);
        assert!(path.is_dir());

        let missing = directory.path().join("missing/file");
        let error = write(&missing, b"content", 0o644).expect_err("no directory");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn concurrent_writers_do_not_mix_their_content() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("file");
        let contents = [b'a', b'b', b'c'].map(|byte| vec![byte; 100_000]);
        std::thread::scope(|scope| {
            for content in &contents {
                scope
                    .spawn(|| (0..20).for_each(|_| write(&path, content, 0o644).expect("written")));
            }
        });
        assert!(contents.contains(&fs::read(&path).expect("the file")));
        assert_eq!(names(directory.path()), ["file"]);
    }
}
