"""The grids of GGUF's IQ blocks: which eight, or four, values a number of a block stands for.

An entry is 16 bits: of IQ1 and IQ2 eight codes of two bits, of IQ3 four of three bits, the first value in the lowest.
What a code means is said by `ops/iq_blocks.py` and `native/few_bits.h`. The numbers are those of ggml's `ggml-common.h`,
packed: each grid rises, so what is kept are the steps.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from functools import cache

import numpy as np
from numpy.typing import NDArray

# In the order of `Grid` in native/types.h, with their entries.
SIZES: Mapping[str, int] = {
    "iq2_xxs": 256,
    "iq2_xs": 512,
    "iq2_s": 1024,
    "iq1": 2048,
    "iq3_xxs": 256,
    "iq3_s": 512,
}
_STEPS = (
    "c-oy>TZ|k>6}?r{)zdrOvoG)L%<PW$VQ*~5al#VI*hC>H!32WkAO)HAW69VivK=Q5R(RMTOCb^b@rk0KD8ULykq}Y{;v*=EWr09^@In6hf!`"
    "<+f)6Bw1gCD@s;TaoS#P4%%yie|)_t6N?(MdTG}Z8@sgCagzbQU#zRqX@zdhV%)S*6)8M=p#(i~mF=n9>s7nB{Hk##B7t@64#+LZe}v>Wnf="
    "sHeV$KDm%R7Tcx<;+jf4SJA%N3-;yaq^b2ZjH}-hEHFo1|<C)(%)6~-eC4Hy+U82*J++UU@g|^VR`{GuhQG}ma$qtKszBx)0_By2fzQ5b@TK"
    "Ktldoq)OFRNZ_%&Rd#%{wj3#lOv*ao?c^LZ*bey6in3<(lSckLF|GT*RD=F>d8hV#bLdGino{rH~W94PA`z*e1&_i^dK7<Y$zW6tNg?_1KFn"
    "$dC|3v>acK<$DbOL+7NH^i594nuvTl!Yp+Hx3Lyab=^qxb0_%Ew}bZqlRlIDH%QEA)oas;T~EtZ#dC4x^Xp5AfJ7+C@#ZUi&HiJ$;-G(GPHb"
    "M;}RkLsW{ty{^khw{q{X;I9p4&Q;bpDe)@n)2{e29$gJ+YS1;c^+`I4#jp&El^6MHo)$3w2;ER+OdCjZn(Tv*8ni(kEg4<INJh_L^qkpRivn"
    "xfW3^a^$2G9(v|YDxQPow}V>T`?%8uK(J4Ej&mjn0V?tc0nR-K~{fT9gkw!)vY!d|ym8PNSIBKsulI>l1D(C{|wnxQWsL%Z}NIt`?1c;*ltg"
    "m?akmDhpX^PJ_^TH`IQ`fjw%1{(AwhuijSRmR7_H&-O%dvuyEz(Wt<?rr6zOd+dYht>z#hF6gdqY$(%p0lXYbPHT^fi~2DFIMsCWA$}>egY4"
    "Cn)+&v?uGQnuyYUgd`{gkUZY7c$ZlX^P3=LxJ*VdBKdeiizNVi>9{&wl1+7}65U>teR^CR4x6R}?nGrQD;rf(BwZ=JmH*j_oar-7cK`$#Cw?"
    "n*t4`SC-Pcq-k(kbKF={~T<E+F}z@W?eV!DrbE@6$!>d5fm?3HllR8O(9hIKG~T4&MRmWpo_=wPU;JtBk=D^cQuIo`-dI)Ou!<zK`oS@VN-T"
    "ezg3zSM3rK4E{FgPWfx+jL39eDe&1GkzIc6JuJBazx37CdQ>&<l}?<9&WTr=Z7^IB@tf1AjQ^`@*hUjs5lgigpBLuw<I5$9Q^+w}M<+R=dw|"
    "(XW|ZX%L!OP})!5SN?J@fm$zH=z>dEiDV{QIuo*cKrGrSpMnf;vQaZHzocHS5vs|yA=@9Vu87b_Q!DQMHcUmT-C&M8XzHNc-K$Du$sV6**{s"
    "v>TCmf3pcYeARZRI#5QK=wLKeuygG0T--|U~C`Tg)MTS7(&Fvn0(nPb{@3_<Dukv^>J~w9aL;xbMHbg>99I(|JvBS^IWaD4x6nqYU@1tc$l_"
    "z`bD+f-J`T0bUe4!@VxDn2VF*&o<*fQWgI`0S?SJx>cUUXU&p}3W{f7bKVL$oK1V;MD_r|dpmtrtNJsUl-zxV7zN?6tu!xvvv`6k0-)(U2*2"
    "Bo#L!MmTwja@bhKSrQW#ALs**pl0y@%%$&Ansa#QGIuqdkz)Kv&>Sx`1A6YaH4qhd#RbC3;Qy=spc=AH(=V>Z<V-F_WBl0#`3Xzt{K)$#T+3"
    "{$7&qV;wsek@a0VqJFEE&|Cf*9p+2iFW7G2EV_ia{wI{n^WP#{puviZGLnb6)1+j!hO0b6kr4*a=x_Y~Gei3qxtGbAecgyXIbpBbyNk;0v`="
    "9LTde2+UvKh>3Uh8nn{kk0#Er+i*rsX7^sMA&pTX*V5$-aK8pc?`+Fw+obTuQra7OmzkkP{mh11-~KJiU4*7gi*7lWpQ*$YNRGGpep()Y>gg"
    "#A!u4#ROs*-{<6VUP)vQo*i-h^Df~^TBe6mU}YK#iJSaFXBAKF&+5P?d@^Ali>Zj=y@t2VK^pkERS?l(aJWTqj+r`RmI+^Me+9<8LoVOPhE7"
    "in%Bbq9!4{+@P;la!^n#3wLeP-B+LLQTC7NbWgV;@=wsNo8Q<GEE9opX;cc6L<>+{f8A!WeVoW%{lu=Qg^++pN6C<(mUR%b>lq0;!CswoA2v"
    "1e#&Zw!-<HS+bJmOBY8a;*Uf*B{qqFcKf;y<YUn|wl@&$Kz4b2JtiX$`tCGQ+ILz2)=r+vk`W;mHZXu#1ti*h)TA*)_0uM8>vUF0TbkozC~M"
    "rG|OUo#3qW2=g6MJ&J!G@a!vU&U0T6nbhN6-f%y@g4r45)*QSwU6Gaxg0y(J9;9Vpb2XGpzH9aO9_0hnEACu|G3#{RV6M%hsG0C2m4&q)4PC"
    "5t4D9UctAa;zV6h(cyMx@(g2jY!k_tZjlZ&g{F+*uVR4?+omv{xS(IN5;eg=adP0T|k*kDTb+C5A1>v?{&#8gfTYlDk**{fbhUE1NFV9W8?k"
    "gRmNELCD=by|^pw%%yaS*3yu7q_IukB(vD$f}ap+LV>>=;Chmh&`*uvTWJ9VQZ^rw<Si^nE~E5WK37sw<^067+RHTl`d6~uHe9pC7hpr<cu1"
    "4-uiX|nI7kpv&iY;FzQ)&R6Z4qyE{j{!&#F>XB1$l1blC}7ARo}7fZKdBINZ%(BJC$lo>E@5zy!PvqLRgha)B`*e5lqV~OZ(#};sQ7W#xs{J"
    "ocv;3{N>-q3O0vr36?o!`puPRdnwS=Q;`3(pgqQI)mtwW=Icix9C>;-7?G!g=5{*M^+WQj)cC^fdd^`auhSYKdur-vpMpsLe<uGv=K->h2lw"
    "L=oN(DT&2IC0{#yN-jB=u;(=09iB}b+bFL6lYDMLr(4xZlZSdyjO`C~z?cbKr<sejL^L1UEAEy0H!S<Ia$RPVbHl~PzMZ-x|9;_o&=%a3Yru"
    "f(;vQv^d*gwwuER-$9}}*t6Y$CAQ2lO)zSmZU_6R@t$}?4Y)8I5;<w%a}mF@cd!!k|55mVu9gs-|P?5fH0Lfq%o12RnLaXmvXbClz^0Gq+C<"
    "%+Lr-0^GLK_}JVo!cbxu~Fe6C*R5T6*=R2QSEUvW*D{2D%6q4#tff^oZgU3uvwf&%;amkwQGTUNyU{!kz=GyH51<OG(u&znXnT2s($7Dlkc4"
    "uMlg!+76)(HTz>V@1x*L9Iv!sO74fnehXl)R!}xN%?6f@~p7eUG@;ZC}G_Ov%V%(`y{Dvyz`70TEvT*-;6Jw#=5fr8V%+-J^AsPu=odh<t-d"
    "|(<c=pu%mLO)Dy<6BmC0%-tuRMG0#q4DoC1p65i21;<R*Eg1;O;Sz(R%P^&d&jEwR@V-jE<B!GUeSl?M7D2aefs%pW=R+4#FpMEVG5x(?PcT"
    ")trqT9<gJe2=jH?#ad26t0wl@r{CS+zJz8Wx1i&gS&1Yi;q8wWt?Tjx>pCW<WfR{`=wod=fX^zVba3Cm+Rw8#?eN58HFj0rX^}H_>}gHROvC"
    "T9^cj5bz>1X7w2YA!bZkLl&d-AuN5^qz`Dq%fX3!%pqc-P!atm`cmVQ6~8(M}H)A(Ix+cMOponp6r3i~oNwkxN3$4;zRf}}O<c@)y_qEF&vJ"
    "MXIIEY=->UHhSz0T!Bk-l}BZEFDGsm0(<zdborufR^_;J{~newi3J~JmM;IUFuQF<653;YP=?49&(bJjPx|%%AS$(j;2H~=ertv)P7Gf8#z1"
    "~Sv$oTbAFq_o$FWp8mq}%q^Gya*MLdst{fg}va8Og)p<T;UatjTSWO!I@m_HHDc(85{e<&UQ?ka&Y(+Askb?<VZI2-LoSg9PtfZw5S}F07yK"
    "jb`L$gLn@UT6j!*`94p$*Q@nt0Pbwfj?T&gRU9HP+De+?G8i_>3Ii8Lw_|momq_uI9IP3!;y&13KWO!FKrPX3ZJf;M47li(ywfdS}~&aKt1d"
    "!g1sbN4UwdbJn1NyB+vj5${@-aWQfB+bo}E7S&>%k=Z%c&afX0zc)<D^$wofc5@zB{^>G$?Ef_ALWep2KPEYQsmrn)&$;)$shnk)FIU);4L-"
    "HW-G!~FP3|31c{|gPckDZ`>o8j~iC>S|7FWbN@_8QGq-=L8??0#L5Y|pft(n8xMR0<~sAD@Pp<vdqENyFfFXWu{XP1#N3E3{IJK%$9=+Fit{"
    "|_lUN9+"
)  # fmt: skip


@cache
def all_grids() -> NDArray[np.uint16]:
    """Every grid behind the one before, [4608]; not to be written to."""
    steps = np.frombuffer(zlib.decompress(base64.b85decode(_STEPS)), "<i2").astype(np.int64)
    parts = np.split(steps, np.cumsum(list(SIZES.values()))[:-1])
    grids = np.concatenate([part.cumsum() for part in parts]).astype(np.uint16)
    grids.flags.writeable = False
    return grids


@cache
def codes(grid: str) -> NDArray[np.uint8]:
    """[entries, 8 or 4] of one grid."""
    at = list(SIZES).index(grid)
    start, bits = sum(list(SIZES.values())[:at]), 3 if grid.startswith("iq3") else 2
    words = all_grids()[start : start + SIZES[grid], None]
    shifts = np.arange(0, 8 * 2 if bits == 2 else 4 * 3, bits, dtype=np.uint16)
    return ((words >> shifts) & np.uint16(2**bits - 1)).astype(np.uint8)
