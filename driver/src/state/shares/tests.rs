use std::{os::unix::fs::MetadataExt, sync::Mutex};

use tessera_intercept_abi::{ComputePolicy, LedgerReport, Text};

use super::*;

/// Records mounts, which need no privilege.
#[derive(Debug, Default)]
struct RecordedMounts {
    mounted: Mutex<Vec<(PathBuf, Tmpfs)>>,
}

impl Mounts for RecordedMounts {
    fn mount_tmpfs(&self, target: &Path, tmpfs: Tmpfs) -> io::Result<()> {
        self.mounted.lock().expect("no panic").push((target.to_owned(), tmpfs));
        Ok(())
    }

    fn unmount(&self, target: &Path) -> io::Result<()> {
        let mut mounted = self.mounted.lock().expect("no panic");
        let at = mounted
            .iter()
            .rposition(|(path, _)| path == target)
            .ok_or(io::ErrorKind::InvalidInput)?;
        mounted.remove(at);
        Ok(())
    }

    fn is_mounted(&self, target: &Path) -> io::Result<bool> {
        Ok(self.mounted.lock().expect("no panic").iter().any(|(path, _)| path == target))
    }

    fn forbids_execution(&self, _: &Path) -> io::Result<bool> {
        Ok(false)
    }
}

fn share(claim: &str, index: usize) -> ClaimDeviceName {
    let claim = ClaimUid::new(claim).expect("a UID");
    ClaimDeviceName::of_result(&claim, index, None).expect("a name")
}

fn grant(share: &ClaimDeviceName, memory_limit_bytes: u64) -> Grant {
    Grant {
        gpu_uuid: "GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77".parse().expect("a UUID"),
        memory_limit_bytes,
        context_bytes: 0,
        cores_percent: 25,
        policy: ComputePolicy::None,
        oversubscribe: false,
        mps: false,
        claim_uid: Text::new(share.claim().as_str()).expect("text"),
        id: Text::new(&share.to_string()).expect("text"),
        sequence: 0,
    }
}

struct Node {
    directory: tempfile::TempDir,
    mounts: Arc<RecordedMounts>,
    files: ShareFiles,
}

fn node() -> Node {
    let directory = tempfile::tempdir().expect("a directory");
    let mounts = Arc::new(RecordedMounts::default());
    let files = ShareFiles::new(StatePaths::new(directory.path()), mounts.clone());
    Node { directory, mounts, files }
}

#[test]
fn grant_changes_in_place_with_sequence() {
    let node = node();
    let share = share("claim", 0);
    node.files.write_grant(&share, &grant(&share, 1 << 30)).expect("written");
    let path = StatePaths::new(node.directory.path()).grant(&share);
    let inode = fs::metadata(&path).expect("there").ino();
    assert_eq!(fs::metadata(&path).expect("there").mode() & 0o777, 0o644);

    node.files.write_grant(&share, &grant(&share, 1 << 30)).expect("the same again");
    assert_eq!(Grant::parse(&fs::read(&path).expect("there")).expect("a grant").sequence, 0);

    node.files.write_grant(&share, &grant(&share, 2 << 30)).expect("changed");
    let found = Grant::parse(&fs::read(&path).expect("there")).expect("a grant");
    assert_eq!((found.memory_limit_bytes, found.sequence), (2 << 30, 2));
    assert_eq!(fs::metadata(&path).expect("there").ino(), inode);
}

#[test]
fn keeps_grant_of_another_abi_version() {
    let node = node();
    let share = share("claim", 0);
    node.files.write_grant(&share, &grant(&share, 1 << 30)).expect("written");
    let path = StatePaths::new(node.directory.path()).grant(&share);
    let mut page = fs::read(&path).expect("there");
    page[tessera_intercept_abi::grant_offset::ABI_VERSION] = 99;
    fs::write(&path, &page).expect("written");

    let error = node.files.write_grant(&share, &grant(&share, 1 << 30)).expect_err("refused");
    assert!(
        matches!(error, ShareError::Grant { source: GrantError::AbiVersion { found: 99 }, .. }),
        "{error:?}"
    );
    assert_eq!(fs::read(&path).expect("there"), page);
}

#[test]
fn grants_are_on_a_dedicated_tmpfs() {
    let node = node();
    node.files.mount_grants().expect("mounted");
    node.files.mount_grants().expect("there");
    let mounted = node.mounts.mounted.lock().expect("no panic");
    let [(path, tmpfs)] = &mounted[..] else { panic!("{mounted:?}") };
    assert_eq!(*path, StatePaths::new(node.directory.path()).grants());
    assert_eq!(tmpfs.inodes, GRANTS_TMPFS_INODES);
}

#[test]
fn ledger_is_on_a_tmpfs_of_its_length() {
    let node = node();
    let share = share("claim", 0);
    node.files.make_ledger(&share).expect("made");

    let paths = StatePaths::new(node.directory.path());
    let expected = Tmpfs { size_bytes: LEDGER_LEN as u64, inodes: 2, executable: false };
    assert_eq!(
        *node.mounts.mounted.lock().expect("no panic"),
        [(paths.ledger_mount(&share), expected)]
    );
    let content = fs::read(paths.ledger(&share)).expect("there");
    assert_eq!(LedgerReport::parse(&content).expect("a ledger").used_bytes(), 0);
    assert_eq!(fs::metadata(paths.ledger(&share)).expect("there").mode() & 0o777, 0o666);
}

#[test]
fn ledger_in_use_is_not_changed() {
    let node = node();
    let share = share("claim", 0);
    node.files.make_ledger(&share).expect("made");
    let path = StatePaths::new(node.directory.path()).ledger(&share);
    fs::write(&path, "written by the container").expect("written");

    node.files.make_ledger(&share).expect("made");
    assert_eq!(fs::read_to_string(&path).expect("there"), "written by the container");
    assert_eq!(node.mounts.mounted.lock().expect("no panic").len(), 1);
}

#[test]
fn removal_is_complete_and_idempotent() {
    let node = node();
    let shares = [share("claim", 0), share("claim", 1)];
    for share in &shares {
        node.files.write_grant(share, &grant(share, 1)).expect("written");
        node.files.make_ledger(share).expect("made");
    }
    for share in shares.iter().chain(&shares) {
        node.files.remove_ledger(share).expect("removed");
        node.files.remove_grant(share).expect("removed");
    }
    assert!(node.mounts.mounted.lock().expect("no panic").is_empty());
    assert!(node.files.claims().expect("listed").is_empty());
}

#[test]
fn removes_files_of_other_shares() {
    let node = node();
    let (kept, sibling, other) = (share("kept", 0), share("kept", 1), share("gone", 0));
    for share in [&kept, &sibling, &other] {
        node.files.write_grant(share, &grant(share, 1)).expect("written");
        node.files.make_ledger(share).expect("made");
    }
    let cleaned = node.files.retain(&BTreeSet::from([kept.clone()])).expect("cleaned");

    assert_eq!(cleaned.removed, BTreeSet::from([sibling.to_string(), other.to_string()]));
    assert_eq!(node.files.claims().expect("listed"), BTreeSet::from([kept.claim().clone()]));
    assert!(node.files.has_ledger(&kept).expect("there"));
    assert_eq!(node.mounts.mounted.lock().expect("no panic").len(), 1);
}

#[test]
fn unknown_files_are_kept_and_reported() {
    let node = node();
    let paths = StatePaths::new(node.directory.path());
    let gone = share("gone", 0);
    node.files.write_grant(&gone, &grant(&gone, 1)).expect("written");
    let mut stray = Vec::new();
    for parent in [paths.grants(), paths.ledgers()] {
        fs::create_dir_all(parent.join("a-claim/lost+found")).expect("made");
        fs::create_dir_all(parent.join("Not A UID")).expect("made");
        fs::write(parent.join("notes.txt"), "precious").expect("written");
        fs::write(parent.join("a-claim/a-claim-0"), "a file where a directory would be")
            .expect("written");
        let below = ["Not A UID", "a-claim/a-claim-0", "a-claim/lost+found", "notes.txt"];
        stray.extend(below.map(|name| parent.join(name)));
    }
    let mut cleaned = node.files.retain(&BTreeSet::new()).expect("cleaned");

    cleaned.foreign.sort();
    assert_eq!(cleaned.foreign, stray);
    assert!(cleaned.failed.is_empty(), "{:?}", cleaned.failed);
    assert_eq!(cleaned.removed, BTreeSet::from([gone.to_string()]));
    assert!(stray.iter().all(|path| path.exists()));
    assert!(node.files.claims().expect("listed").is_empty(), "unknown files are no claims");
}
