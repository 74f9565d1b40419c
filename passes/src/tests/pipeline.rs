//! Pipelines as text.

use crate::pipeline::{parse, print};

#[test]
fn options_print_as_they_read() {
    let shard = "shard{strategy=ring,ring=2,enc=4,movement=name(a=1, b=2),cross-movement=gather(groups=2),sequence.s=enc+ring,sequence.t=none}";
    for (text, prints) in [
        (shard, shard),
        ("pack", "pack"),
        ("pack{kinds=permute+all_to_all,bytes=7}", "pack{kinds=all_to_all+permute,bytes=7}"),
        ("prefetch", "prefetch"),
        ("prefetch{layers=1}", "prefetch"),
        ("prefetch{layers=0}", "prefetch{layers=0}"),
    ] {
        assert_eq!(print(&parse(text).unwrap()), prints);
    }
    for wrong in [
        "pack{kinds=slice}",
        "pack{bytes=many}",
        "pack{fast=yes}",
        "prefetch{layers=2}",
        "prefetch{layers=many}",
        "prefetch{far=yes}",
    ] {
        assert_eq!(parse(wrong).err().unwrap().code, "P02", "{wrong}");
    }
}
