//! The bindings against the library and the header under `NCCL_HOME`, as far as no GPU is needed.

#[path = "../../../tests/common/require.rs"]
mod require;

use std::env;
use std::mem::offset_of;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use nccl_rs::sys::{API_MAGIC, RawConfig, SUM, UNDEFINED, UNIQUE_ID_BYTES};
use nccl_rs::{Communicator, DataType, Error, Library, State, Status, UniqueId};

fn library() -> Option<Library> {
    Library::open().inspect_err(|error| require::skip("nccl", error)).ok()
}

#[test]
fn the_library_says_its_version_and_makes_ids() {
    let Some(library) = library() else { return };
    let (major, minor, _) = library.version().unwrap();
    assert!((major, minor) >= (2, 10), "NCCL {major}.{minor}");
    assert_eq!(library.has_all_to_all(), (major, minor) >= (2, 28));
    let ids = [library.unique_id(), library.unique_id()];
    let [a, b] = ids.map(Result::unwrap);
    assert_ne!(a.bytes(), b.bytes());
    assert_eq!(UniqueId::from_bytes(*a.bytes()), a);
}

#[test]
fn a_rank_out_of_range_is_refused_before_the_library_is_called() {
    let Some(library) = library() else { return };
    let id = UniqueId::from_bytes([0; UNIQUE_ID_BYTES]);
    let expected = Error::Range { what: "rank", value: 2, bound: 2 };
    assert_eq!(library.init_rank(2, &id, 2).unwrap_err(), expected);
}

/// On a machine without a GPU a communicator fails with the library's words, now or in the background; it never hangs.
#[test]
fn a_rank_without_a_device_fails_with_a_message() {
    let Some(library) = library() else { return };
    if PathBuf::from("/dev/nvidia0").exists() {
        require::skip("no GPU", &"this machine has a GPU");
        return;
    }
    let id = library.unique_id().unwrap();
    let created = library.init_rank(1, &id, 0);
    let ended = |comm: Communicator| {
        let since = Instant::now();
        loop {
            match comm.state()? {
                State::Ready => return Ok(()),
                State::Failed(status) => return Err(Error::background(status)),
                State::InProgress => assert!(since.elapsed() < Duration::from_secs(60), "it hangs"),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let error = created.and_then(ended).unwrap_err();
    assert!(matches!(error, Error::Failed { .. }), "{error}");
}

#[test]
fn a_missing_function_names_the_version_that_has_it() {
    let error = Error::Missing { call: "ncclCommSplit", needs: (2, 18) };
    assert_eq!(error.to_string(), "ncclCommSplit needs NCCL 2.18 or newer");
}

#[test]
fn types_are_those_of_the_header() {
    let include = |name: &str| env::var_os(name).map(|home| PathBuf::from(home).join("include"));
    let (Some(nccl), Some(cuda)) = (include("NCCL_HOME"), include("CUDA_HOME")) else {
        require::skip("nccl", &"NCCL_HOME and CUDA_HOME do not say where nccl.h and cuda_runtime.h are");
        return;
    };
    let compiler = ["g++", "c++", "clang++"]
        .into_iter()
        .find(|tool| Command::new(tool).arg("--version").output().is_ok_and(|o| o.status.success()));
    let Some(compiler) = compiler else {
        require::skip("g++", &"no C++ compiler");
        return;
    };
    let mut text = "#include <cstddef>\n#include <nccl.h>\n".to_owned();
    let mut same = |a: &str, b: i128| text.push_str(&format!("static_assert(({a}) == ({b}), \"{a}\");\n"));
    same("sizeof(ncclUniqueId)", UNIQUE_ID_BYTES as i128);
    same("NCCL_CONFIG_UNDEF_INT", UNDEFINED.into());
    same("ncclSum", SUM.into());
    same("NCCL_API_MAGIC", API_MAGIC.into());
    // The header's struct may have grown; ours is its start.
    text.push_str(&format!("static_assert(sizeof(ncclConfig_t) >= {}, \"\");\n", size_of::<RawConfig>()));
    let mut same = |a: &str, b: i128| text.push_str(&format!("static_assert(({a}) == ({b}), \"{a}\");\n"));
    for (field, offset) in [
        ("size", offset_of!(RawConfig, size)),
        ("magic", offset_of!(RawConfig, magic)),
        ("version", offset_of!(RawConfig, version)),
        ("blocking", offset_of!(RawConfig, blocking)),
        ("cgaClusterSize", offset_of!(RawConfig, cga_cluster_size)),
        ("minCTAs", offset_of!(RawConfig, min_ctas)),
        ("maxCTAs", offset_of!(RawConfig, max_ctas)),
        ("netName", offset_of!(RawConfig, net_name)),
        ("splitShare", offset_of!(RawConfig, split_share)),
        ("trafficClass", offset_of!(RawConfig, traffic_class)),
    ] {
        same(&format!("offsetof(ncclConfig_t, {field})"), offset as i128);
    }
    for (name, dtype, size) in [
        ("ncclInt8", DataType::I8, "1"),
        ("ncclInt32", DataType::I32, "4"),
        ("ncclFloat16", DataType::F16, "sizeof(__half)"),
        ("ncclFloat32", DataType::F32, "sizeof(float)"),
        ("ncclFloat64", DataType::F64, "sizeof(double)"),
        ("ncclBfloat16", DataType::BF16, "sizeof(__nv_bfloat16)"),
    ] {
        same(name, dtype as i128);
        same(size, dtype.bytes() as i128);
    }
    for code in 1..8 {
        let status = Status::of(code).unwrap();
        same(status.name(), code.into());
    }
    let out = env::temp_dir().join(format!("nccl-header-{}.cpp", std::process::id()));
    std::fs::write(&out, text).unwrap();
    let run = Command::new(compiler)
        .args(["-std=c++17", "-fsyntax-only", "-w", "-isystem"])
        .arg(&nccl)
        .arg("-isystem")
        .arg(&cuda)
        .arg(&out)
        .output()
        .unwrap();
    std::fs::remove_file(&out).unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
}
