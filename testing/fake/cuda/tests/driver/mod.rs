//! A fake node whose libcuda is loaded as programs load it.
#![allow(dead_code, reason = "each test file uses its part")]

use std::ffi::{CString, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use tempfile::TempDir;
use tessera_fake_world::tree::Libraries;
use tessera_fake_world::{FakeNode, artifact};

pub(crate) const SUCCESS: u32 = 0;
pub(crate) const MIB: u64 = 1 << 20;

/// Any function of the driver. It has more arguments than the longest needs, which the C calling
/// conventions permit.
type AnyFunction = unsafe extern "C" fn(
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
) -> u32;

/// A fake node and its driver.
pub(crate) struct Driver {
    pub(crate) node: FakeNode,
    handle: *mut c_void,
    _directory: TempDir,
}

impl Driver {
    /// Loads the driver of a world without initialising it.
    pub(crate) fn load(world: &str) -> Self {
        let directory = TempDir::new().expect("a temporary directory");
        let libraries = Libraries {
            nvml: artifact::nvml().expect("the library is built"),
            cuda: Some(artifact::cuda().expect("the library is built")),
        };
        let node =
            FakeNode::create(world, &libraries, directory.path()).expect("the node is created");
        let handle = open(&node.cuda());
        Self { node, handle, _directory: directory }
    }

    /// Loads and initialises the driver, and makes the first GPU's primary context current.
    pub(crate) fn begin(world: &str) -> Self {
        let driver = Self::load(world);
        driver.ok("cuInit", [0]);
        driver.context(0);
        driver
    }

    /// Makes a GPU's primary context current.
    pub(crate) fn context(&self, gpu: usize) {
        let mut context = 0_usize;
        self.ok("cuDevicePrimaryCtxRetain", [out(&mut context), gpu]);
        self.ok("cuCtxSetCurrent", [context]);
    }

    /// Returns true if the driver exports a function.
    pub(crate) fn has(&self, name: &str) -> bool {
        !self.find(name).is_null()
    }

    fn find(&self, name: &str) -> *mut c_void {
        let name = CString::new(name).expect("a name without zeroes");
        // SAFETY: the library is open and the name is terminated.
        unsafe { libc::dlsym(self.handle, name.as_ptr()) }
    }

    /// Calls a function; omitted arguments are 0.
    pub(crate) fn call<const N: usize>(&self, name: &str, arguments: [usize; N]) -> u32 {
        let address = self.find(name);
        // SAFETY: every symbol of the driver is a C function of integer and pointer arguments; null
        // becomes `None`.
        let function = unsafe { std::mem::transmute::<*mut c_void, Option<AnyFunction>>(address) };
        let function = function.unwrap_or_else(|| panic!("{name} is not exported"));
        let mut a = [0; 12];
        a[..N].copy_from_slice(&arguments);
        // SAFETY: tests pass 0 or pointers to the values that the function expects; see
        // `AnyFunction` for the number.
        unsafe {
            function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11])
        }
    }

    /// Calls a function that must succeed.
    pub(crate) fn ok<const N: usize>(&self, name: &str, arguments: [usize; N]) {
        assert_eq!(self.call(name, arguments), SUCCESS, "{name}");
    }

    /// Returns free and total bytes.
    pub(crate) fn memory(&self) -> (u64, u64) {
        let (mut free, mut total) = (0_u64, 0_u64);
        self.ok("cuMemGetInfo_v2", [out(&mut free), out(&mut total)]);
        (free, total)
    }

    /// Returns a function of a module.
    pub(crate) fn function(&self, name: &str) -> usize {
        let (mut module, mut function) = (0_usize, 0_usize);
        let name = CString::new(name).expect("a name without zeroes");
        self.ok("cuModuleLoadData", [out(&mut module), c"image".as_ptr() as usize]);
        self.ok("cuModuleGetFunction", [out(&mut function), module, name.as_ptr() as usize]);
        function
    }

    /// Launches one block.
    pub(crate) fn launch(&self, function: usize, stream: usize) {
        self.launch_blocks(function, 1, stream);
    }

    pub(crate) fn launch_blocks(&self, function: usize, blocks: usize, stream: usize) {
        self.ok("cuLaunchKernel", [function, blocks, 1, 1, 32, 1, 1, 0, stream]);
    }
}

/// Returns the address of a result.
pub(crate) fn out<T>(place: &mut T) -> usize {
    std::ptr::from_mut(place) as usize
}

fn open(path: &Path) -> *mut c_void {
    let path = CString::new(path.as_os_str().as_bytes()).expect("a path without zeroes");
    // SAFETY: loads the library of this workspace, whose initialiser only reads the world.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!handle.is_null(), "the library loads");
    handle
}
