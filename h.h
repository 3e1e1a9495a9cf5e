inline const char* g() { return __FILE__; }
inline const char* gg = g();
