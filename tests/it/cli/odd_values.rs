//! Odd values of options, and messages that say which values are right.

use super::{ithaca, refused, workplace};

/// Values that are odd wherever they stand.
const ODD: [&str; 12] =
    ["", " ", "=", "-1", "1.5", "nan", "é", "1e400", "99999999999999999999", "a,b", "a=b=c", "{x}"];

#[test]
fn odd_values_of_every_option_are_refused_or_do_what_they_say() {
    let folder = workplace();
    let at = folder.path();
    let base = ["plan", "examples/gpt2", "--seq", "64", "--strategy", "ring", "--gpus", "2"];
    let train = ["--mode", "train"];
    let check = |arguments: &[&str], value: &str| {
        let ran = ithaca(at, arguments);
        for form in ["Some(", "None", "Err(", "Error {", "ParseInt", "RUST_BACKTRACE"] {
            assert!(!ran.err.contains(form), "{arguments:?}: {ran:#?}");
        }
        match ran.code {
            0 => assert!(ran.out.contains("ring=2"), "{arguments:?} {value}: {ran:#?}"),
            _ => {
                assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{arguments:?}: {ran:#?}");
                assert!(ran.err.contains("error"), "{arguments:?}: {ran:#?}");
                assert!(!ran.err.contains("unexpected argument"), "{arguments:?}: {ran:#?}");
            }
        }
    };
    for flag in [
        "--dtype",
        "--mode",
        "--capacity",
        "--ignore-field",
        "--cluster",
        "--mesh",
        "--order",
        "--zero",
        "--fuse",
        "--layer-strategy",
        "--movement",
        "--cross-movement",
        "--sequence-axes",
        "--target-seq",
    ] {
        for value in ODD {
            let given = format!("{flag}={value}");
            check(&[&base[..], &[&given]].concat(), value);
        }
        check(&[&base[..], &[flag, "/"]].concat(), "/");
    }
    for flag in ["--recompute", "--loss-chunks", "--micro-batches", "--pipeline", "--train"] {
        for value in ODD {
            let given = format!("{flag}={value}");
            check(&[&base[..], &train, &[&given]].concat(), value);
        }
    }
    let constants = ["lr", "beta1", "beta2", "eps", "weight_decay", "clip", "dropout", "optimizer", "stages"];
    for key in constants {
        for value in ["", "-1", "nan", "inf", "1e400", "off off", "é"] {
            let given = format!("--train={key}={value}");
            let ran = ithaca(at, [&base[..], &train, &[&given]].concat());
            assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{given}: {ran:#?}");
            assert!(ran.err.contains(&format!("`--train {key}={value}` is not ")), "{ran:#?}");
        }
    }
}

#[test]
fn messages_say_what_a_value_should_be() {
    let folder = workplace();
    let at = folder.path();
    let plan = "plan examples/gpt2 --seq 64 --strategy ring";
    for (arguments, says) in [
        (format!("{plan} --mesh ring=99999999999999999999"), "is not a whole number from 1 to 1048576"),
        (format!("{plan} --mesh ring=2,,tp=2"), "is no axis"),
        (format!("{plan} --mesh="), "`--mesh` is empty"),
        (format!("{plan} --gpus 2 --movement gather(groups=0)"), "has 1 group of heads or more, not 0"),
        (format!("{plan} --gpus 2 --layer-strategy block="), "is not FUNCTION=NAME"),
        (format!("{plan} --gpus 2 --sequence-axes s="), "is not DIM=AXIS[+AXIS]"),
        (format!("{plan} --gpus 2 --mode train --train lr=off"), "is not a number that is zero or more"),
        (format!("{plan} --gpus 2 --mode train --train beta1=1"), "is not a number from 0 to 1, 1 excluded"),
        (format!("{plan} --gpus 2 --zero -1"), "there is no ZeRO stage -1"),
        (format!("{plan} --gpus 2 --capacity -1"), "`-1` is not a capacity of experts"),
        (format!("{plan} --gpus 99999999999999999999"), "is not a whole number from 1 to"),
        ("run examples/gpt2 --shrink --seed x".to_owned(), "`x` is not a whole number from 0 to"),
        ("run examples/gpt2 --shrink --layer-strategy block=ring".to_owned(), "axis that one device lacks"),
        (
            "run examples/gpt2 --shrink -o examples".to_owned(),
            "`examples` is a folder, and the output is a file",
        ),
        ("run examples/gpt2 --shrink --trace .".to_owned(), "`.` is a folder, and the output is a file"),
        (format!("{plan} --gpus 2 -o examples"), "`examples` is a folder, and the output is a file"),
        ("plan examples/gpt2 --gpus 1 --seq 64 --mesh ring=2".to_owned(), "has 2 ranks, but `--gpus` is 1"),
        ("plan examples/gpt2 --gpus 2 --seq 64 --mesh ring=1".to_owned(), "has 1 rank, but `--gpus` is 2"),
    ] {
        let refusal = refused(at, &arguments);
        assert!(refusal.contains(says), "{arguments}: {refusal}");
    }
}
