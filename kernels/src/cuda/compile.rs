//! Kernels compiled at run time by NVRTC, for one architecture. It needs no GPU and no headers.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString, c_char, c_int};

use cudarc::nvrtc::sys;

use super::available;
use super::error::CudaError;
use ithaca_device::SOURCES;
use ithaca_device::catalogue::translation_unit;

/// A generation of GPUs, by its compute capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Architecture {
    /// The number before the point.
    pub major: u32,
    /// The number after the point.
    pub minor: u32,
}

/// Compiled kernels of one architecture.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// A module for the driver.
    pub cubin: Vec<u8>,
    /// The name of each kernel in the module.
    pub names: BTreeMap<String, CString>,
}

/// Compiles kernels, by their [names](ithaca_device::catalogue).
///
/// # Errors
/// [`Unavailable`](super::Unavailable) without NVRTC, [`CudaError::Compile`] with its log.
pub fn compile(kernels: &BTreeSet<String>, architecture: Architecture) -> Result<Compiled, CudaError> {
    available::nvrtc()?;
    let program = Program::new(&translation_unit())?;
    let expressions: Vec<(&String, CString)> =
        kernels.iter().map(|name| (name, c_string(&format!("ithaca::kernel::{name}")))).collect();
    for (_, expression) in &expressions {
        // SAFETY: the program and the string are alive.
        program.check("nvrtcAddNameExpression", unsafe {
            sys::nvrtcAddNameExpression(program.raw, expression.as_ptr())
        })?;
    }
    let Architecture { major, minor } = architecture;
    // Warpgroup products (wgmma) are features of sm_90a.
    let suffix = if (major, minor) == (9, 0) { "a" } else { "" };
    let architecture = format!("--gpu-architecture=sm_{major}{minor}{suffix}");
    // Generic lambdas within kernels are functions that nothing says are the device's.
    let options = [&architecture, "--std=c++17", "--device-as-default-execution-space"];
    let options: Vec<CString> = options.iter().map(|option| c_string(option)).collect();
    let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let n = c_int::try_from(pointers.len()).expect("there are a few options");
    // SAFETY: the program and the options are alive.
    let status = unsafe { sys::nvrtcCompileProgram(program.raw, n, pointers.as_ptr()) };
    if status != sys::nvrtcResult::NVRTC_SUCCESS {
        return Err(CudaError::Compile { log: program.log() });
    }
    let mut names = BTreeMap::new();
    for (name, expression) in &expressions {
        let mut lowered: *const c_char = std::ptr::null();
        // SAFETY: the program is compiled, the strings are alive.
        program.check("nvrtcGetLoweredName", unsafe {
            sys::nvrtcGetLoweredName(program.raw, expression.as_ptr(), &mut lowered)
        })?;
        // SAFETY: the string lives as long as the program.
        names.insert((*name).clone(), unsafe { CStr::from_ptr(lowered) }.to_owned());
    }
    let mut size = 0;
    // SAFETY: the program is compiled, the pointer is to a live integer.
    program.check("nvrtcGetCUBINSize", unsafe { sys::nvrtcGetCUBINSize(program.raw, &mut size) })?;
    let mut cubin = vec![0_u8; size];
    // SAFETY: the buffer has the size that the program reports.
    program.check("nvrtcGetCUBIN", unsafe { sys::nvrtcGetCUBIN(program.raw, cubin.as_mut_ptr().cast()) })?;
    Ok(Compiled { cubin, names })
}

/// A program of NVRTC.
struct Program {
    raw: sys::nvrtcProgram,
}

impl Program {
    fn new(text: &str) -> Result<Self, CudaError> {
        let (text, name) = (c_string(text), c_string("kernels.cu"));
        let headers: Vec<(CString, CString)> =
            SOURCES.iter().map(|(name, text)| (c_string(name), c_string(text))).collect();
        let names: Vec<*const c_char> = headers.iter().map(|(name, _)| name.as_ptr()).collect();
        let texts: Vec<*const c_char> = headers.iter().map(|(_, text)| text.as_ptr()).collect();
        let n = c_int::try_from(headers.len()).expect("there are a few headers");
        let mut program = Self { raw: std::ptr::null_mut() };
        // SAFETY: all strings live for the call, which copies them.
        let status = unsafe {
            sys::nvrtcCreateProgram(
                &mut program.raw,
                text.as_ptr(),
                name.as_ptr(),
                n,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        program.check("nvrtcCreateProgram", status)?;
        Ok(program)
    }

    fn check(&self, call: &'static str, status: sys::nvrtcResult) -> Result<(), CudaError> {
        match status {
            sys::nvrtcResult::NVRTC_SUCCESS => Ok(()),
            status => Err(CudaError::Failed { call, detail: format!("{status:?}") }),
        }
    }

    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: the program is alive, the pointer is to a live integer.
        if unsafe { sys::nvrtcGetProgramLogSize(self.raw, &mut size) } != sys::nvrtcResult::NVRTC_SUCCESS {
            return String::new();
        }
        let mut log = vec![0_u8; size];
        // SAFETY: the buffer has the size that the program reports.
        unsafe { sys::nvrtcGetProgramLog(self.raw, log.as_mut_ptr().cast()) };
        String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: the program is alive. A failure cannot be reported from here.
            unsafe { sys::nvrtcDestroyProgram(&mut self.raw) };
        }
    }
}

fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).expect("zeros were replaced")
}

#[cfg(test)]
#[path = "../../../tests/common/require.rs"]
mod require;

#[cfg(test)]
mod tests {
    use ithaca_ir::DType;

    use super::*;
    use ithaca_device::catalogue::{c_type, catalogue};
    use ithaca_device::flash;

    /// Compiles all kernels of some types. No kernel depends on the architecture, and compiling all of them takes minutes:
    /// tensor-core kernels are compiled in every width for sm_90, and in one width for the others.
    fn compile_all(major: u32, dtypes: &[DType]) {
        if let Err(error) = available::nvrtc() {
            require::skip("nvrtc", &error);
            return;
        }
        let mut kernels = catalogue(dtypes);
        if major != 9 {
            kernels.retain(|name| !name.starts_with("flash"));
            kernels.extend(flash::ALL[0].kernels(c_type(DType::F16)));
        }
        let compiled = compile(&kernels, Architecture { major, minor: 0 }).unwrap();
        assert_eq!(compiled.names.len(), kernels.len());
        assert!(compiled.cubin.starts_with(b"\x7fELF"));
    }

    #[test]
    fn kernels_in_single_precision_compile_for_sm_80() {
        compile_all(8, &[DType::F32, DType::I32, DType::Bool]);
    }

    #[test]
    fn kernels_in_bf16_and_double_precision_compile_for_sm_90() {
        compile_all(9, &[DType::BF16, DType::F64]);
    }

    #[test]
    fn kernels_in_half_precision_compile_for_sm_100() {
        compile_all(10, &[DType::F16]);
    }

    #[test]
    fn the_compiler_reports_an_unknown_kernel() {
        if let Err(error) = available::nvrtc() {
            require::skip("nvrtc", &error);
            return;
        }
        let kernels = ["no_such_kernel<float>".to_owned()].into();
        let error = compile(&kernels, Architecture { major: 9, minor: 0 }).unwrap_err();
        assert!(matches!(&error, CudaError::Compile { log } if log.contains("no_such_kernel")), "{error}");
    }
}
