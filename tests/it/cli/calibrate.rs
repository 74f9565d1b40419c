//! `calibrate`: from logs and tables to a cluster file that planning takes.

use super::{refused, said, workplace};

const LOG: &str = "\
# nThread 1 nGpus 4 minBytes 1048576 maxBytes 16777216 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid   4011 on    node-1 device  0 [0x1b] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   4011 on    node-1 device  1 [0x2b] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid   4011 on    node-1 device  2 [0x3b] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid   4011 on    node-1 device  3 [0x4b] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    40.00   26.21   39.32      0    40.10   26.15   39.22      0
     4194304       1048576     float     sum      -1    62.00   67.65  101.48      0    62.10   67.54  101.31      0
    16777216       4194304     float     sum      -1   150.00  111.85  167.77      0   150.10  111.77  167.66      0
# Out of bounds values : 0 OK
";

const KERNELS: &str =
    "kind,dtype,m,n,k,microseconds\nmatmul,bf16,8192,8192,8192,1500\nmatmul,bf16,1024,1024,1024,12\n";

#[test]
fn measurements_become_a_cluster_file_that_plans_take() {
    let folder = workplace();
    let at = folder.path();
    std::fs::write(at.join("all_reduce.log"), LOG).unwrap();
    std::fs::write(at.join("gemm.csv"), KERNELS).unwrap();
    let arguments = "calibrate --nccl-tests all_reduce.log --kernels gemm.csv -o ours.toml";
    let text = said(at, arguments);
    assert!(
        text.starts_with("measured      points  error before  error after\nall_reduce 4       3"),
        "{text}"
    );
    let written = std::fs::read_to_string(at.join("ours.toml")).unwrap();
    assert!(written.contains("    \"all_reduce 4: 1048576 40, 4194304 62, 16777216 150\",\n"), "{written}");
    assert!(!written.contains("\"all_reduce 8:"), "curves of other machines give way: {written}");
    // What was measured is met, so a second calibration by the same changes nothing.
    let again = said(at, &arguments.replace("calibrate", "calibrate --base ours.toml"));
    let error = |row: &str| row.split_whitespace().rev().nth(3).map(str::to_owned);
    assert_eq!(again.lines().nth(1).and_then(error).as_deref(), Some("0.0"), "{again}");
    let plan = said(
        at,
        "plan examples/llama-3-8b --cluster ours.toml --gpus 4 --seq 8192 --strategy megatron-tp --mesh tp=4",
    );
    assert!(plan.contains("of ours (NVIDIA H100"), "{plan}");
}

#[test]
fn measurements_that_cannot_be_are_refused_with_their_line() {
    let folder = workplace();
    let at = folder.path();
    std::fs::write(at.join("all_reduce.log"), LOG.replacen("167.77      0", "167.77    512", 1)).unwrap();
    std::fs::write(at.join("gemm.csv"), KERNELS.replace(",12\n", ",2\n")).unwrap();
    let error = refused(at, "calibrate --nccl-tests all_reduce.log -o ours.toml");
    assert!(error.contains("error[M23]: 512 elements of all_reduce of 16777216 bytes are wrong"), "{error}");
    assert!(error.contains("all_reduce.log:14"), "{error}");
    let error = refused(at, "calibrate --kernels gemm.csv -o ours.toml");
    assert!(
        error.contains("error[M24]: matmul bf16 of b=1 m=1024") && error.contains("gemm.csv:3"),
        "{error}"
    );
    let error = refused(at, "calibrate -o ours.toml");
    assert!(error.contains("nothing to calibrate by"), "{error}");
}
