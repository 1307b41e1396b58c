"""PTX that unpacks 32 bits of four 8-bit elements into fp16: $0 gets the two even elements of $2,
$1 the two odd ones. Used by kernels/triton/kv8.py and kernels/hopper/dequant.py.
"""

E4M3 = """{
    .reg .b32 t;
    .reg .b16 even, odd;
    prmt.b32 t, $2, 0, 0x3120;
    mov.b32 {even, odd}, t;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}"""
# fp16 0x64xx is 1024 + xx. With xx = x + 128 the fp16 number is x + 1152; then 1152 is subtracted.
INT8 = """{
    .reg .b32 even, odd, offset;
    mov.b32 offset, 0x64806480;
    shr.u32 odd, $2, 8;
    lop3.b32 even, $2, 0x00ff00ff, offset, 0x6a;
    lop3.b32 odd, odd, 0x00ff00ff, offset, 0x6a;
    sub.f16x2 $0, even, offset;
    sub.f16x2 $1, odd, offset;
}"""
