//! Kernels compiled at run time by NVRTC, for one architecture. It needs no GPU and no headers.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString, c_char, c_int};

use cudarc::nvrtc::sys;

use super::available;
use super::cache::{self, Cache};
use super::error::CudaError;
use ithaca_device::SOURCES;
use ithaca_device::catalogue::translation_unit;

pub use super::cache::Compiled;

/// A generation of GPUs, by its compute capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Architecture {
    /// The number before the point.
    pub major: u32,
    /// The number after the point.
    pub minor: u32,
}

/// Compiles kernels, by their [names](ithaca_device::catalogue), or takes them from the cache of kernels on disk.
///
/// # Errors
/// [`Unavailable`](super::Unavailable) without NVRTC, [`CudaError::Compile`] with its log.
pub fn compile(kernels: &BTreeSet<String>, architecture: Architecture) -> Result<Compiled, CudaError> {
    available::nvrtc()?;
    let Some(cache) = Cache::from_environment() else { return generate(kernels, architecture) };
    let (version, unit, options) = (version()?, translation_unit(), options(architecture));
    let sources = SOURCES.iter().flat_map(|(name, text)| [*name, *text]);
    let options = options.iter().map(String::as_str);
    let parts = [version.as_str(), &unit].into_iter().chain(sources).chain(options);
    let key = cache::key(parts.chain(kernels.iter().map(String::as_str)));
    if let Some(compiled) = cache.read(&key) {
        return Ok(compiled);
    }
    let compiled = generate(kernels, architecture)?;
    cache.write(&key, &compiled);
    Ok(compiled)
}

/// The version of NVRTC.
fn version() -> Result<String, CudaError> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the pointers are to live integers.
    let status = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    check("nvrtcVersion", status)?;
    Ok(format!("{major}.{minor}"))
}

fn options(Architecture { major, minor }: Architecture) -> Vec<String> {
    // Warpgroup products (wgmma) are features of sm_90a.
    let suffix = if (major, minor) == (9, 0) { "a" } else { "" };
    vec![
        format!("--gpu-architecture=sm_{major}{minor}{suffix}"),
        "--std=c++17".to_owned(),
        // Generic lambdas within kernels are functions that nothing says are the device's.
        "--device-as-default-execution-space".to_owned(),
    ]
}

fn generate(kernels: &BTreeSet<String>, architecture: Architecture) -> Result<Compiled, CudaError> {
    let program = Program::new(&translation_unit())?;
    let expressions = program.compile(kernels, &options(architecture))?;
    let mut names = BTreeMap::new();
    for (name, expression) in &expressions {
        let mut lowered: *const c_char = std::ptr::null();
        // SAFETY: the program is compiled, the strings are alive.
        check("nvrtcGetLoweredName", unsafe {
            sys::nvrtcGetLoweredName(program.raw, expression.as_ptr(), &mut lowered)
        })?;
        // SAFETY: the string lives as long as the program.
        names.insert((*name).clone(), unsafe { CStr::from_ptr(lowered) }.to_owned());
    }
    let mut size = 0;
    // SAFETY: the program is compiled, the pointer is to a live integer.
    check("nvrtcGetCUBINSize", unsafe { sys::nvrtcGetCUBINSize(program.raw, &mut size) })?;
    let mut cubin = vec![0_u8; size];
    // SAFETY: the buffer has the size that the program reports.
    check("nvrtcGetCUBIN", unsafe { sys::nvrtcGetCUBIN(program.raw, cubin.as_mut_ptr().cast()) })?;
    Ok(Compiled { cubin, names })
}

fn check(call: &'static str, status: sys::nvrtcResult) -> Result<(), CudaError> {
    match status {
        sys::nvrtcResult::NVRTC_SUCCESS => Ok(()),
        status => Err(CudaError::Failed { call, detail: format!("{status:?}") }),
    }
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
        check("nvrtcCreateProgram", status)?;
        Ok(program)
    }

    /// Compiles kernels; the expressions that name them, in their order.
    fn compile<'a>(
        &self,
        kernels: &'a BTreeSet<String>,
        options: &[String],
    ) -> Result<Vec<(&'a String, CString)>, CudaError> {
        let expressions: Vec<(&String, CString)> =
            kernels.iter().map(|name| (name, c_string(&format!("ithaca::kernel::{name}")))).collect();
        for (_, expression) in &expressions {
            // SAFETY: the program and the string are alive.
            check("nvrtcAddNameExpression", unsafe {
                sys::nvrtcAddNameExpression(self.raw, expression.as_ptr())
            })?;
        }
        let options: Vec<CString> = options.iter().map(|option| c_string(option)).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let n = c_int::try_from(pointers.len()).expect("there are a few options");
        // SAFETY: the program and the options are alive.
        let status = unsafe { sys::nvrtcCompileProgram(self.raw, n, pointers.as_ptr()) };
        if status != sys::nvrtcResult::NVRTC_SUCCESS {
            return Err(CudaError::Compile { log: self.log() });
        }
        Ok(expressions)
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

    /// Checks all kernels of some types, tensor-core kernels of every width among them, and generates code for a few of
    /// each kind: code for all of them takes minutes, and emitted programs have nvcc generate it for those in use.
    fn compile_all(major: u32, dtypes: &[DType]) {
        if let Err(error) = available::nvrtc() {
            require::skip("nvrtc", &error);
            return;
        }
        let architecture = Architecture { major, minor: 0 };
        let mut kernels = catalogue(dtypes);
        let mut syntax = options(architecture);
        syntax.push("--fdevice-syntax-only".to_owned());
        Program::new(&translation_unit()).unwrap().compile(&kernels, &syntax).unwrap();
        kernels.retain(|name| !name.starts_with("flash"));
        let mut few: BTreeSet<String> = kernels.into_iter().step_by(12).collect();
        if dtypes.contains(&DType::F16) || dtypes.contains(&DType::BF16) {
            few.extend(flash::ALL[0].kernels(c_type(dtypes[0])));
        }
        let compiled = generate(&few, architecture).unwrap();
        assert_eq!(compiled.names.len(), few.len());
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
        let error = generate(&kernels, Architecture { major: 9, minor: 0 }).unwrap_err();
        assert!(matches!(&error, CudaError::Compile { log } if log.contains("no_such_kernel")), "{error}");
    }
}
