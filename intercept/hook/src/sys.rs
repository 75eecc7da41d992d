//! System calls without libc's wrappers, which may be interposed, and at which threads can be
//! cancelled.

use core::ffi::{CStr, c_char, c_int, c_long, c_void};
use core::ptr;
use core::sync::atomic::{AtomicU32, Ordering};

use libc::{
    SYS_clock_gettime, SYS_close, SYS_connect, SYS_fcntl, SYS_fstatfs, SYS_futex, SYS_getdents64,
    SYS_getpid, SYS_madvise, SYS_mmap, SYS_munmap, SYS_openat, SYS_ppoll, SYS_pread64,
    SYS_recvfrom, SYS_sched_yield, SYS_socket, SYS_statx, SYS_write,
};

/// An open file; closed when dropped.
pub(crate) struct Fd(c_int);

impl Drop for Fd {
    fn drop(&mut self) {
        // SAFETY: this type owns the descriptor, which is not used again.
        unsafe { libc::syscall(SYS_close, self.0) };
    }
}

/// Status of a file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileStatus {
    /// Device and inode.
    pub(crate) identity: (u64, u64),
    /// Length in bytes.
    pub(crate) length: u64,
    /// True for a regular file.
    pub(crate) regular: bool,
    /// True if the kernel reports that it is the root of a mount.
    pub(crate) mount_root: bool,
    /// True if the kernel reports that: from Linux 5.8 on.
    pub(crate) reports_mount_root: bool,
}

/// File system of a file, and the mount that it was opened through.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileSystem {
    /// True if the mount is read-only.
    pub(crate) read_only: bool,
    /// Number of inodes that it can have, if it is a tmpfs.
    pub(crate) tmpfs_inodes: Option<u64>,
}

/// Length of the kernel's `struct statfs` on 64-bit machines, in words, and the offsets of its
/// fields: the crate libc hides the flags.
const STATFS_WORDS: usize = 15;
const STATFS_TYPE: usize = 0;
const STATFS_FILES: usize = 5;
const STATFS_FLAGS: usize = 10;

/// Current directory, for `openat`.
pub(crate) const HERE: c_int = libc::AT_FDCWD;

impl Fd {
    /// Opens a file. A symbolic link at the end of the path is not followed.
    pub(crate) fn open_at(directory: c_int, path: &CStr, flags: c_int) -> Option<Self> {
        let flags = flags | libc::O_CLOEXEC | libc::O_NOFOLLOW;
        // SAFETY: the path is terminated.
        let fd = unsafe { libc::syscall(SYS_openat, directory, path.as_ptr(), flags, 0) };
        c_int::try_from(fd).ok().filter(|fd| *fd >= 0).map(Self)
    }

    /// Returns the descriptor.
    pub(crate) fn raw(&self) -> c_int {
        self.0
    }

    /// Reads from an offset of the file; returns the number of bytes. `None` on an error.
    pub(crate) fn read_at(&self, into: &mut [u8], at: u64) -> Option<usize> {
        // SAFETY: the buffer has this length.
        let read =
            unsafe { libc::syscall(SYS_pread64, self.0, into.as_mut_ptr(), into.len(), at as i64) };
        usize::try_from(read).ok()
    }

    /// Reads from the start of the file; returns the number of bytes.
    pub(crate) fn read_start(&self, into: &mut [u8]) -> usize {
        self.read_at(into, 0).unwrap_or(0)
    }

    /// Reads entries of a directory; returns the number of bytes.
    pub(crate) fn entries(&self, into: &mut [u8]) -> usize {
        // SAFETY: the buffer has this length.
        let read = unsafe { libc::syscall(SYS_getdents64, self.0, into.as_mut_ptr(), into.len()) };
        usize::try_from(read).unwrap_or(0)
    }

    /// Returns the status of the file.
    pub(crate) fn status(&self) -> Option<FileStatus> {
        status(self.0, c"", libc::AT_EMPTY_PATH)
    }

    /// Returns the file system of the file.
    pub(crate) fn file_system(&self) -> Option<FileSystem> {
        let mut status = [0_u64; STATFS_WORDS];
        // SAFETY: `status` has the length of the kernel's `statfs`.
        let code = unsafe { libc::syscall(SYS_fstatfs, self.0, &raw mut status) };
        let is_tmpfs = status[STATFS_TYPE] == libc::TMPFS_MAGIC as u64;
        (code == 0).then_some(FileSystem {
            read_only: status[STATFS_FLAGS] & libc::ST_RDONLY != 0,
            tmpfs_inodes: is_tmpfs.then_some(status[STATFS_FILES]),
        })
    }

    /// Takes the lock on one byte for this open file; returns false if another one has it.
    pub(crate) fn try_lock(&self, offset: u64) -> bool {
        self.set_lock(offset, libc::F_WRLCK)
    }

    /// Releases the lock on one byte.
    pub(crate) fn unlock(&self, offset: u64) {
        self.set_lock(offset, libc::F_UNLCK);
    }

    fn set_lock(&self, offset: u64, kind: c_int) -> bool {
        // SAFETY: plain data, for which zeroes are valid; `l_pid` must be 0 for this kind of lock.
        let mut lock: libc::flock64 = unsafe { core::mem::zeroed() };
        lock.l_type = kind as _;
        lock.l_whence = libc::SEEK_SET as _;
        lock.l_start = offset as _;
        lock.l_len = 1;
        // SAFETY: `lock` is a local `flock64`.
        unsafe { libc::syscall(SYS_fcntl, self.0, libc::F_OFD_SETLK, &raw const lock) == 0 }
    }
}

/// Non-blocking connection to a socket of the file system.
pub(crate) struct Connection(Fd);

impl Connection {
    /// Connects; `None` if no process listens, or if the queue is full.
    pub(crate) fn open(path: &CStr) -> Option<Self> {
        // SAFETY: plain data, for which zeroes are valid.
        let mut address: libc::sockaddr_un = unsafe { core::mem::zeroed() };
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        let bytes = path.to_bytes_with_nul();
        let room = address.sun_path.get_mut(..bytes.len())?;
        room.iter_mut().zip(bytes).for_each(|(place, byte)| *place = *byte as c_char);
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: no pointers.
        let fd = unsafe { libc::syscall(SYS_socket, libc::AF_UNIX, kind, 0) };
        let socket = c_int::try_from(fd).ok().filter(|fd| *fd >= 0).map(Fd)?;
        let length = size_of::<libc::sockaddr_un>();
        // SAFETY: the address is of that length.
        let code = unsafe { libc::syscall(SYS_connect, socket.0, &raw const address, length) };
        (code == 0).then_some(Self(socket))
    }

    /// Waits until there are bytes to receive, at most until a time.
    pub(crate) fn await_bytes(&self, until_ns: u64) {
        let mut polled = libc::pollfd { fd: self.0.0, events: libc::POLLIN, revents: 0 };
        while let Some(left) = until_ns.checked_sub(monotonic_ns()) {
            let time = libc::timespec { tv_sec: 0, tv_nsec: left.min(999_999_999).cast_signed() };
            // SAFETY: both live as long as the call, which keeps the signal mask as it is.
            let code = unsafe {
                libc::syscall(
                    SYS_ppoll,
                    &raw mut polled,
                    1,
                    &raw const time,
                    ptr::null::<c_void>(),
                    0,
                )
            };
            // Interrupted by a signal: waits for the rest of the time.
            if code >= 0 {
                return;
            }
        }
    }

    /// Receives the bytes that have arrived; returns their number.
    pub(crate) fn receive(&self, into: &mut [u8]) -> usize {
        let (at, none) = (into.as_mut_ptr(), ptr::null_mut::<c_void>());
        // SAFETY: the buffer has this length, and no address of the sender is requested.
        let read = unsafe {
            libc::syscall(SYS_recvfrom, self.0.0, at, into.len(), libc::MSG_DONTWAIT, none, none)
        };
        usize::try_from(read).unwrap_or(0)
    }
}

/// Returns the status of a file by its path, relative to a directory.
pub(crate) fn status(directory: c_int, path: &CStr, flags: c_int) -> Option<FileStatus> {
    // SAFETY: plain data, for which zeroes are valid.
    let mut status: libc::statx = unsafe { core::mem::zeroed() };
    // SAFETY: the path is terminated, `status` is a local `statx`.
    let code = unsafe {
        libc::syscall(
            SYS_statx,
            directory,
            path.as_ptr(),
            flags,
            libc::STATX_BASIC_STATS,
            &raw mut status,
        )
    };
    let root = libc::STATX_ATTR_MOUNT_ROOT as u64;
    (code == 0).then_some(FileStatus {
        identity: (
            u64::from(status.stx_dev_major) << 32 | u64::from(status.stx_dev_minor),
            status.stx_ino,
        ),
        length: status.stx_size,
        regular: u32::from(status.stx_mode) & libc::S_IFMT == libc::S_IFREG,
        mount_root: status.stx_attributes & status.stx_attributes_mask & root != 0,
        reports_mount_root: status.stx_attributes_mask & root != 0,
    })
}

/// Kind of a mapping.
#[derive(Clone, Copy)]
pub(crate) enum Map<'a> {
    /// New and zeroed; not inherited by forked children.
    Private,
    /// New and zeroed; zeroed again in a forked child.
    WipedOnFork,
    /// A file, read-only; not inherited by forked children.
    Read(&'a Fd),
    /// A file, shared; not inherited by forked children.
    Shared(&'a Fd),
    /// A file without access: keeps the file open as long as this address space lives. Not
    /// inherited by forked children.
    NoAccess(&'a Fd),
}

/// Length from which huge pages are requested: with 100,000 live allocations, half of the time of a
/// call is the page table walk in the tables. Two huge pages at least, so that one is complete
/// wherever the mapping begins.
const WORTH_HUGE_PAGES: usize = 4 << 20;

/// Maps memory.
pub(crate) fn map(how: Map<'_>, length: usize) -> Option<*mut c_void> {
    let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let both = libc::PROT_READ | libc::PROT_WRITE;
    let (protection, flags, fd, advice) = match how {
        Map::Private => (both, anonymous, -1, libc::MADV_DONTFORK),
        Map::WipedOnFork => (both, anonymous, -1, libc::MADV_WIPEONFORK),
        Map::Read(fd) => (libc::PROT_READ, libc::MAP_SHARED, fd.0, libc::MADV_DONTFORK),
        Map::Shared(fd) => (both, libc::MAP_SHARED, fd.0, libc::MADV_DONTFORK),
        Map::NoAccess(fd) => (libc::PROT_NONE, libc::MAP_SHARED, fd.0, libc::MADV_DONTFORK),
    };
    // SAFETY: a new mapping at an address of the kernel's choice changes no other memory.
    let at = unsafe {
        libc::syscall(SYS_mmap, ptr::null_mut::<c_void>(), length, protection, flags, fd, 0_i64)
    };
    if at == -1 {
        return None;
    }
    let at = at as *mut c_void;
    // SAFETY: advice about the mapping that was just made.
    if unsafe { libc::syscall(SYS_madvise, at, length, advice) } != 0 {
        // SAFETY: no reference to the mapping exists yet.
        unsafe { unmap(at, length) };
        return None;
    }
    if matches!(how, Map::Private) && length >= WORTH_HUGE_PAGES {
        // SAFETY: as above; if the kernel refuses, nothing changes.
        unsafe { libc::syscall(SYS_madvise, at, length, libc::MADV_HUGEPAGE) };
    }
    Some(at)
}

/// Unmaps memory.
///
/// # Safety
/// It came from [`map`], with that length, and nothing refers to it any more.
pub(crate) unsafe fn unmap(at: *mut c_void, length: usize) {
    // SAFETY: by this function's contract.
    unsafe { libc::syscall(SYS_munmap, at, length) };
}

/// Returns the process's id in its own PID namespace.
pub(crate) fn pid() -> u32 {
    // SAFETY: no arguments, never fails.
    let pid: c_long = unsafe { libc::syscall(SYS_getpid) };
    u32::try_from(pid).unwrap_or(0)
}

/// Returns the monotonic time in nanoseconds.
pub(crate) fn monotonic_ns() -> u64 {
    time_ns(libc::CLOCK_MONOTONIC)
}

/// Returns the real time in microseconds since 1970.
pub(crate) fn real_time_us() -> u64 {
    time_ns(libc::CLOCK_REALTIME) / 1_000
}

fn time_ns(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a local `timespec`.
    unsafe { libc::syscall(SYS_clock_gettime, clock, &raw mut time) };
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

/// Writes to stderr with one call, which may write a part only.
pub(crate) fn write_stderr(bytes: &[u8]) {
    const STDERR: c_int = 2;
    // SAFETY: reads that many bytes.
    unsafe { libc::syscall(SYS_write, STDERR, bytes.as_ptr(), bytes.len()) };
}

/// Returns the inode of the process's PID namespace.
pub(crate) fn pid_namespace() -> u64 {
    status(HERE, c"/proc/self/ns/pid", 0).map_or(0, |status| status.identity.1)
}

/// Writes `/proc/<pid>/cmdline`.
pub(crate) fn path_of_process(pid: u32, room: &mut [u8; 32]) -> Option<&CStr> {
    let mut digits = [0_u8; 10];
    let mut rest = pid;
    let mut first = digits.len();
    while first == digits.len() || rest > 0 {
        first -= 1;
        *digits.get_mut(first)? = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    let parts = [b"/proc/".as_slice(), digits.get(first..)?, b"/cmdline"];
    let path = parts.into_iter().flatten();
    room.fill(0);
    room.iter_mut().zip(path).for_each(|(place, byte)| *place = *byte);
    CStr::from_bytes_until_nul(room).ok()
}

/// Yields to other threads.
pub(crate) fn yield_thread() {
    // SAFETY: no arguments, never fails.
    unsafe { libc::syscall(SYS_sched_yield) };
}

/// Yields to a thread that completes something short. After some repetitions it sleeps, because
/// that thread may be preempted.
pub(crate) fn back_off(times: usize) {
    back_off_for(times, 1_000_000);
}

/// As [`back_off`], with the length of a sleep in ns.
pub(crate) fn back_off_for(times: usize, sleep_ns: u64) {
    const AWAKE: usize = 32;
    if times < AWAKE {
        yield_thread();
    } else {
        wait_shared(&AtomicU32::new(0), 0, sleep_ns);
    }
}

/// Sleeps for a time, or until the futex, which processes share, is woken. Returns at once if the
/// word has another value.
pub(crate) fn wait_shared(word: &AtomicU32, value: u32, ns: u64) {
    let time = libc::timespec {
        tv_sec: (ns / 1_000_000_000).cast_signed(),
        tv_nsec: (ns % 1_000_000_000).cast_signed(),
    };
    // SAFETY: word and time live as long as the call; a time span counts by the monotonic clock.
    unsafe { libc::syscall(SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, &raw const time) };
}

/// Sleeps for a time in ns; shorter if the thread gets a signal.
#[cfg(feature = "hami")]
pub(crate) fn sleep(ns: u64) {
    wait_shared(&AtomicU32::new(0), 0, ns);
}

/// Runs a function while this thread gets no signals. A thread that it begins never gets any.
#[cfg(feature = "hami")]
pub(crate) fn without_signals<T>(run: impl FnOnce() -> T) -> T {
    let set_mask = |new: u64| {
        let mut before = 0_u64;
        // SAFETY: both sets are local variables of the kernel's length.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigprocmask,
                libc::SIG_SETMASK,
                &raw const new,
                &raw mut before,
                size_of::<u64>(),
            )
        };
        before
    };
    let before = set_mask(u64::MAX);
    let result = run();
    set_mask(before);
    result
}

/// Wakes all waiters of a futex that processes share.
pub(crate) fn wake_shared(word: &AtomicU32) {
    // SAFETY: the word lives as long as the call.
    unsafe { libc::syscall(SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, c_int::MAX) };
}

/// Lock between threads; zero is unlocked.
#[repr(transparent)]
pub(crate) struct Lock(AtomicU32);

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and a thread waits.
const WANTED: u32 = 2;

/// Spins before a thread sleeps: the critical sections are shorter than a sleep.
const SPINS: usize = 100;

impl Lock {
    /// Runs a function under the lock.
    pub(crate) fn hold<T>(&self, run: impl FnOnce() -> T) -> T {
        if !self.take() && !self.take_soon() {
            while self.0.swap(WANTED, Ordering::Acquire) != FREE {
                self.futex(libc::FUTEX_WAIT, WANTED);
            }
        }
        let result = run();
        self.release();
        result
    }

    /// Runs a function under the lock, if no thread holds it now.
    pub(crate) fn try_hold<T>(&self, run: impl FnOnce() -> T) -> Option<T> {
        if !self.take() {
            return None;
        }
        let result = run();
        self.release();
        Some(result)
    }

    fn release(&self) {
        if self.0.swap(FREE, Ordering::Release) == WANTED {
            self.futex(libc::FUTEX_WAKE, 1);
        }
    }

    fn take(&self) -> bool {
        self.0.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Spins, unless other threads sleep already.
    fn take_soon(&self) -> bool {
        for _ in 0..SPINS {
            match self.0.load(Ordering::Relaxed) {
                FREE if self.take() => return true,
                WANTED => return false,
                _ => core::hint::spin_loop(),
            }
        }
        false
    }

    fn futex(&self, operation: c_int, value: u32) {
        let operation = operation | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the word lives as long as `self`; no timeout.
        unsafe {
            libc::syscall(SYS_futex, self.0.as_ptr(), operation, value, ptr::null::<c_void>())
        };
    }
}

/// Creates a file atomically with this content at a path, readable and writable by all users
/// whatever the umask. Returns false if that fails, for example because another process was first.
#[cfg(feature = "hami")]
pub(crate) fn make_shared_file(path: &CStr, temporary: &CStr, start: &[u8], length: usize) -> bool {
    const MODE: c_int = 0o666;
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    let remove = || {
        // SAFETY: the path is terminated.
        unsafe { libc::syscall(libc::SYS_unlinkat, HERE, temporary.as_ptr(), 0) };
    };
    // A process with the same PID may have been killed here before.
    remove();
    // SAFETY: the path is terminated.
    let fd = unsafe { libc::syscall(SYS_openat, HERE, temporary.as_ptr(), flags, MODE) };
    let Some(file) = c_int::try_from(fd).ok().filter(|fd| *fd >= 0).map(Fd) else { return false };
    // SAFETY: a descriptor of this process.
    let opened = unsafe { libc::syscall(libc::SYS_fchmod, file.0, MODE) } == 0;
    // Writes every byte: a full file system fails here, and not later with a signal.
    let made = opened && file.fill(length) && file.write_start(start);
    // SAFETY: the paths are terminated.
    let linked = made
        && unsafe {
            libc::syscall(libc::SYS_linkat, HERE, temporary.as_ptr(), HERE, path.as_ptr(), 0)
        } == 0;
    remove();
    linked
}

#[cfg(feature = "hami")]
impl Fd {
    fn fill(&self, length: usize) -> bool {
        let zeroes = [0_u8; 4096];
        (0..length).step_by(zeroes.len()).all(|at| {
            let part = zeroes.get(..zeroes.len().min(length - at)).unwrap_or_default();
            self.write_at(part, at)
        })
    }

    fn write_start(&self, bytes: &[u8]) -> bool {
        self.write_at(bytes, 0)
    }

    fn write_at(&self, bytes: &[u8], at: usize) -> bool {
        // SAFETY: the buffer has this length.
        let written = unsafe {
            libc::syscall(libc::SYS_pwrite64, self.0, bytes.as_ptr(), bytes.len(), at as i64)
        };
        usize::try_from(written) == Ok(bytes.len())
    }
}
