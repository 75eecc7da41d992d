//! Tests of the C interface: every export of NVIDIA's library exists, and none crashes.

mod node;

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt as _;
use std::ptr;

use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper_sys::bindings::{NvmlLib, field_id, nvmlMemory_v2_t};
use tessera_fake_world::{artifact, shipped};
use tessera_intercept_symbols as symbols;

use node::Node;

const UNINITIALIZED: u32 = 1;
const INVALID_ARGUMENT: u32 = 2;
const NOT_SUPPORTED: u32 = 3;
const VERSION_MISMATCH: u32 = 25;

/// Any NVML function, with more arguments than the longest needs, which the C calling conventions
/// permit.
type AnyFunction =
    unsafe extern "C" fn(usize, usize, usize, usize, usize, usize, usize, usize) -> u32;

struct Library(*mut libc::c_void);

impl Library {
    fn open(path: &std::path::Path) -> Self {
        let path = CString::new(path.as_os_str().as_bytes()).expect("a path without zeroes");
        // SAFETY: loads the library of this workspace, which has no initialisers.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null());
        Self(handle)
    }

    fn function(&self, name: &str) -> Option<AnyFunction> {
        let name = CString::new(name).expect("a name without zeroes");
        // SAFETY: the library is open and the name is terminated.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        // SAFETY: every `nvml` symbol is a C function of integer and pointer arguments; null
        // becomes `None`.
        unsafe { std::mem::transmute::<*mut libc::c_void, Option<AnyFunction>>(address) }
    }

    /// Calls a function with zeroes and NULLs.
    fn call_with_zeroes(&self, name: &str) -> u32 {
        let function = self.function(name).unwrap_or_else(|| panic!("{name} is not exported"));
        // SAFETY: the fake checks every pointer; see `AnyFunction` for the number of arguments.
        unsafe { function(0, 0, 0, 0, 0, 0, 0, 0) }
    }
}

fn functions() -> impl Iterator<Item = &'static str> {
    let nvml = symbols::TABLE.iter().filter(|symbol| symbol.library() == symbols::Library::Nvml);
    nvml.map(|symbol| symbol.symbol.text)
}

#[test]
fn functions_need_initialisation_and_accept_null() {
    let node = Node::new(shipped::DGX_1V);
    let library = Library::open(&node.nvml_path());
    let excluded =
        ["nvmlInit", "nvmlInit_v2", "nvmlInitWithFlags", "nvmlShutdown", "nvmlErrorString"];
    for name in functions().filter(|name| !excluded.contains(name)) {
        let answer = library.call_with_zeroes(name);
        assert!(
            [UNINITIALIZED, INVALID_ARGUMENT].contains(&answer),
            "{name} returns {answer} uninitialised"
        );
    }
    assert_eq!(library.call_with_zeroes("nvmlShutdown"), UNINITIALIZED);
    assert_eq!(library.call_with_zeroes("nvmlInit_v2"), 0);
    for name in functions().filter(|name| !excluded.contains(name)) {
        let answer = library.call_with_zeroes(name);
        assert!(
            [INVALID_ARGUMENT, NOT_SUPPORTED, 6].contains(&answer),
            "{name} returns {answer} to NULLs"
        );
    }
    assert_eq!(library.call_with_zeroes("nvmlShutdown"), 0);
    assert_eq!(library.call_with_zeroes("nvmlDeviceGetCount_v2"), UNINITIALIZED);
}

#[test]
fn null_results_are_invalid_arguments() {
    let node = Node::new(shipped::H100_8_NVSWITCH);
    let library = Library::open(&node.nvml_path());
    assert_eq!(library.call_with_zeroes("nvmlInit_v2"), 0);
    let mut handle = 0_usize;
    let get = library.function("nvmlDeviceGetHandleByIndex_v2").unwrap();
    // SAFETY: the second argument points to the handle.
    assert_eq!(unsafe { get(0, &raw mut handle as usize, 0, 0, 0, 0, 0, 0) }, 0);
    // These functions take a text, an index or a result first.
    let excluded = ["GetHandleBy", "GetCount", "DrainState", "DiscoverGpus", "RemoveGpu"];
    let takes_handle = |name: &&str| {
        name.starts_with("nvmlDevice") && !excluded.iter().any(|part| name.contains(part))
    };
    for name in functions().filter(takes_handle) {
        let function = library.function(name).unwrap();
        // SAFETY: the handle is valid, and all pointers are NULL.
        let answer = unsafe { function(handle, 0, 0, 0, 0, 0, 0, 0) };
        let plausible = [INVALID_ARGUMENT, NOT_SUPPORTED, 6];
        assert!(plausible.contains(&answer), "{name} returns {answer} for a handle and NULLs");
    }
}

#[test]
fn struct_of_other_version_is_rejected() {
    let node = Node::new(shipped::T4_1);
    // SAFETY: loads the library of this workspace.
    let library = unsafe { NvmlLib::new(node.nvml_path()) }.unwrap();
    // SAFETY: all pointers are valid and have the right types.
    unsafe {
        assert_eq!(library.nvmlInit_v2(), 0);
        let mut device = ptr::null_mut();
        assert_eq!(library.nvmlDeviceGetHandleByIndex_v2(0, &mut device), 0);
        let mut memory: nvmlMemory_v2_t = std::mem::zeroed();
        assert_eq!(library.nvmlDeviceGetMemoryInfo_v2(device, &mut memory), VERSION_MISMATCH);
        memory.version = size_of::<nvmlMemory_v2_t>() as u32 | 2 << 24;
        assert_eq!(library.nvmlDeviceGetMemoryInfo_v2(device, &mut memory), 0);
        assert_eq!(memory.total, node.world.gpus[0].model.memory_bytes());
        let mut name = [0; 4];
        assert_eq!(
            library.nvmlDeviceGetName(device, name.as_mut_ptr(), 4),
            7,
            "the name does not fit"
        );
        assert_eq!(library.nvmlShutdown(), 0);
    }
}

#[test]
fn soname_is_nvidias() {
    let path = artifact::nvml().unwrap();
    let content = std::fs::read(path).unwrap();
    let soname = b"\0libnvidia-ml.so.1\0";
    assert!(content.windows(soname.len()).any(|window| window == soname));
}

#[test]
fn field_values_have_individual_results() {
    let node = Node::new(shipped::H100_8_NVSWITCH);
    let nvml = node.nvml();
    let device = nvml.device_by_index(0).unwrap();
    let fields = [
        FieldId(field_id::NVML_FI_DEV_NVLINK_LINK_COUNT),
        FieldId(field_id::NVML_FI_DEV_POWER_INSTANT),
    ];
    let answers = device.field_values_for(&fields).unwrap();
    assert!(matches!(answers[0].as_ref().unwrap().value, Ok(SampleValue::U32(18))), "{answers:?}");
    assert!(
        matches!(answers[1].as_ref().unwrap().value, Err(NvmlError::NotSupported)),
        "{answers:?}"
    );
}

#[test]
fn p2p_works_by_nvlink_or_within_numa_node() {
    use nvml_wrapper_sys::bindings as sys;
    let node = Node::new(shipped::MIXED);
    // SAFETY: loads the library of this workspace.
    let library = unsafe { NvmlLib::new(node.nvml_path()) }.unwrap();
    // SAFETY: all pointers are valid and have the right types.
    unsafe {
        assert_eq!(library.nvmlInit_v2(), 0);
        let handles: Vec<_> = (0..5)
            .map(|index| {
                let mut device = ptr::null_mut();
                assert_eq!(library.nvmlDeviceGetHandleByIndex_v2(index, &mut device), 0);
                device
            })
            .collect();
        let status = |one: usize, other: usize, index| {
            let mut status = 99;
            assert_eq!(
                library.nvmlDeviceGetP2PStatus(handles[one], handles[other], index, &mut status),
                0
            );
            status
        };
        let (nvlink, read) = (
            sys::nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_NVLINK,
            sys::nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_READ,
        );
        assert_eq!((status(0, 1, nvlink), status(0, 1, read)), (0, 0));
        assert_eq!((status(0, 2, nvlink), status(0, 2, read)), (5, 0));
        assert_eq!((status(0, 4, nvlink), status(0, 4, read)), (5, 1));
        assert_eq!(library.nvmlShutdown(), 0);
    }
}
